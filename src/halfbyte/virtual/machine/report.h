// What a launch reports: faults that end it, findings that do not.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace halfbyte::gpu {

struct Warp;
struct Instruction;

// Where something happened. Python adds kernel, PTX line and text from the instruction index.
struct Place {
  int32_t instruction = -1;
  uint32_t cta[3] = {0, 0, 0};
  uint32_t cta_rank = 0;
  int32_t warp = -1;
  int32_t lane = -1;
};

// Ends the launch. `kind` is a stable kebab-case word, e.g. "out-of-bounds", "over-arrival".
struct Fault : std::runtime_error {
  Fault(std::string kind_, const std::string& message, Place place_)
      : std::runtime_error(message), kind(std::move(kind_)), place(place_) {}
  std::string kind;
  Place place;
};

struct Finding {
  std::string kind;
  std::string message;
  Place place;
  uint64_t count = 1;
};

// Keeps the first finding of each (kind, instruction) and counts the rest.
class Findings {
 public:
  void add(const std::string& kind, const std::string& message, const Place& place);
  const std::vector<Finding>& list() const { return findings_; }

 private:
  std::vector<Finding> findings_;
  std::map<std::pair<std::string, int32_t>, size_t> positions_;
};

// printf into a std::string.
std::string format_text(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

[[noreturn]] void raise_fault(const Warp& warp, const Instruction& in, int lane, const char* kind,
                              const std::string& message);

// JSON string literal, quotes included.
std::string quote_json(const std::string& text);

}  // namespace halfbyte::gpu
