// The C interface that Python calls through ctypes. Every function returns promptly but hb_launch.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "machine/simulation.h"

#define HALFBYTE_EXPORT extern "C" __attribute__((visibility("default")))

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kAbiVersion = 3;

char* copy_text(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy != nullptr) std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

std::string place_json(const Place& place) {
  return format_text("{\"instruction\":%d,\"cta\":[%u,%u,%u],\"rank\":%u,\"warp\":%d,\"lane\":%d}",
                     place.instruction, place.cta[0], place.cta[1], place.cta[2], place.cta_rank,
                     place.warp, place.lane);
}

std::string finding_json(const std::string& kind, const std::string& message, const Place& place,
                         uint64_t count) {
  return "{\"kind\":" + quote_json(kind) + ",\"message\":" + quote_json(message) +
         ",\"place\":" + place_json(place) + ",\"count\":" + std::to_string(count) + "}";
}

std::string result_json(const Simulation& simulation, const std::string& status, const std::string& fault) {
  std::ostringstream out;
  out << "{\"status\":" << quote_json(status) << ",\"instructions\":" << simulation.instructions
      << ",\"cycles\":" << format_text("%.0f", simulation.end_time()) << ",\"findings\":[";
  const char* separator = "";
  for (const Finding& finding : simulation.findings.list()) {
    out << separator << finding_json(finding.kind, finding.message, finding.place, finding.count);
    separator = ",";
  }
  out << "]";
  if (!fault.empty()) out << ",\"fault\":" << fault;
  if (!simulation.deadlock.empty()) out << ",\"hang\":" << simulation.deadlock;
  out << "}";
  return out.str();
}

// The table's numbers that are not per instruction; Python fills it, keep the order.
struct ProgramSizes {
  uint32_t num_instructions;
  uint32_t num_operands;
  uint32_t num_attributes;
  uint32_t num_constants;
  uint32_t register_slots;
  uint32_t num_predicates;
  uint32_t static_shared_end;
  uint32_t local_bytes;
};

// A constant's 32-bit words: 1 for 32-bit, 2 for 64-bit, 4 for 128-bit operands.
struct ConstantRecord {
  uint64_t low;
  uint64_t high;
  uint32_t words;
  uint32_t padding;
};

void add_constants(Program& program, const ConstantRecord* records, uint32_t count) {
  size_t slots = 0;
  for (uint32_t i = 0; i < count; ++i) slots += records[i].words;
  // 32 spare words let the storage start at a 128-byte boundary.
  program.constant_storage.assign((slots + 1) * kLanes, 0);
  auto address = reinterpret_cast<uintptr_t>(program.constant_storage.data());
  uint32_t* start = reinterpret_cast<uint32_t*>((address + 127) / 128 * 128);
  program.constants = start;
  int32_t slot = 0;
  for (uint32_t i = 0; i < count; ++i) {
    program.constant_slots.push_back(slot);
    uint32_t* words = start + static_cast<size_t>(slot) * kLanes;
    if (records[i].words == 1) {
      std::fill(words, words + kLanes, static_cast<uint32_t>(records[i].low));
    } else {
      auto* wide = reinterpret_cast<uint64_t*>(words);
      std::fill(wide, wide + kLanes, records[i].low);
      if (records[i].words == 4) std::fill(wide + kLanes, wide + 2 * kLanes, records[i].high);
    }
    slot += static_cast<int32_t>(records[i].words);
  }
}

std::vector<Handler> resolve_handlers(const char* names, std::string& missing) {
  std::vector<Handler> handlers;
  std::istringstream lines(names);
  for (std::string name; std::getline(lines, name);) {
    handlers.push_back(find_handler(name));
    if (handlers.back() == nullptr) missing += name + "\n";
  }
  return handlers;
}

}  // namespace
}  // namespace halfbyte::gpu

using namespace halfbyte::gpu;

HALFBYTE_EXPORT uint32_t hb_abi_version() { return kAbiVersion; }

HALFBYTE_EXPORT void hb_free_text(char* text) { std::free(text); }

// Newline-separated handler names.
HALFBYTE_EXPORT char* hb_list_handlers() {
  std::string names;
  for (const std::string& name : list_handlers()) names += name + "\n";
  return copy_text(names);
}

HALFBYTE_EXPORT void* hb_memory_create() { return new GlobalMemory(); }
HALFBYTE_EXPORT void hb_memory_destroy(void* memory) { delete static_cast<GlobalMemory*>(memory); }
HALFBYTE_EXPORT void hb_memory_register(void* memory, uint64_t begin, uint64_t bytes, const char* name,
                                        uint32_t flags) {
  constexpr uint32_t kReadOnly = 1, kStale = 2;
  static_cast<GlobalMemory*>(memory)->register_buffer(begin, bytes, name, flags & kReadOnly, flags & kStale);
}
HALFBYTE_EXPORT void hb_memory_mark_freed(void* memory, uint64_t begin) {
  static_cast<GlobalMemory*>(memory)->mark_freed(begin);
}

// Returns the program, or nullptr with *missing set to the handler names the core lacks.
HALFBYTE_EXPORT void* hb_program_create(const ProgramSizes* sizes, const InstructionRecord* records,
                                        const int32_t* operands, const int64_t* attributes,
                                        const ConstantRecord* constants, const char* handler_names,
                                        char** missing) {
  std::string unknown;
  const std::vector<Handler> handlers = resolve_handlers(handler_names, unknown);
  *missing = unknown.empty() ? nullptr : copy_text(unknown);
  if (!unknown.empty()) return nullptr;
  auto* program = new Program();
  program->operands.assign(operands, operands + sizes->num_operands);
  program->attributes.assign(attributes, attributes + sizes->num_attributes);
  program->register_slots = sizes->register_slots;
  program->num_predicates = sizes->num_predicates;
  program->static_shared_end = sizes->static_shared_end;
  program->local_bytes = sizes->local_bytes;
  add_constants(*program, constants, sizes->num_constants);
  for (uint32_t i = 0; i < sizes->num_instructions; ++i) {
    const InstructionRecord& record = records[i];
    Instruction in{};
    in.handler = handlers[static_cast<size_t>(record.handler)];
    in.operands = program->operands.data() + record.first_operand;
    in.attributes = program->attributes.data() + record.first_attribute;
    in.index = static_cast<int32_t>(i);
    in.guard = record.guard;
    in.membermask = record.membermask;
    in.num_operands = static_cast<uint16_t>(record.num_operands);
    in.num_attributes = static_cast<uint16_t>(record.num_attributes);
    in.convergence = static_cast<Convergence>(record.convergence);
    program->instructions.push_back(in);
  }
  return program;
}

HALFBYTE_EXPORT void hb_program_destroy(void* program) { delete static_cast<Program*>(program); }

// Runs one launch to its end; returns the result as JSON, to be freed by hb_free_text.
HALFBYTE_EXPORT char* hb_launch(const void* program, void* memory, const LaunchConfig* config) {
  Simulation simulation(*static_cast<const Program*>(program), *static_cast<GlobalMemory*>(memory), *config);
  std::string status = "ok", fault;
  try {
    simulation.run();
    if (!simulation.deadlock.empty()) status = "hang";
  } catch (const Fault& error) {
    status = "fault";
    fault = finding_json(error.kind, error.what(), error.place, 1);
  } catch (const Stopped&) {
    status = "stopped";
  } catch (const std::bad_alloc&) {
    status = "fault";
    fault = finding_json("host-memory", "the host has not enough memory for this launch", Place{}, 1);
  }
  return copy_text(result_json(simulation, status, fault));
}
