#include "machine/report.h"

#include <cstdarg>
#include <cstdio>

#include "machine/warp.h"

namespace halfbyte::gpu {

void Findings::add(const std::string& kind, const std::string& message, const Place& place) {
  auto key = std::make_pair(kind, place.instruction);
  auto found = positions_.find(key);
  if (found != positions_.end()) {
    ++findings_[found->second].count;
    return;
  }
  positions_[key] = findings_.size();
  findings_.push_back({kind, message, place, 1});
}

std::string format_text(const char* pattern, ...) {
  va_list arguments;
  va_start(arguments, pattern);
  va_list copy;
  va_copy(copy, arguments);
  int length = std::vsnprintf(nullptr, 0, pattern, copy);
  va_end(copy);
  std::string text(static_cast<size_t>(length), '\0');
  std::vsnprintf(text.data(), text.size() + 1, pattern, arguments);
  va_end(arguments);
  return text;
}

void raise_fault(const Warp& warp, const Instruction& in, int lane, const char* kind,
                 const std::string& message) {
  throw Fault(kind, message, warp.place(in, lane));
}

std::string quote_json(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c < 0x20 || c >= 0x7F) {
      out += format_text("\\u%04x", c);
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

}  // namespace halfbyte::gpu
