// vprintf: C formatting of each lane's arguments, in lane order.
#include <algorithm>
#include <string>

#include "machine/access.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

constexpr uint64_t kLongestText = 1 << 16;

// A NUL-terminated string at a generic address.
std::string read_text(Warp& warp, const Instruction& in, int lane, uint64_t address) {
  std::string text;
  while (text.size() < kLongestText) {
    const uint8_t byte = *warp.access(in, lane, address++, 1, false);
    if (byte == 0) return text;
    text.push_back(static_cast<char>(byte));
  }
  raise_fault(warp, in, lane, "bad-print", "printf of a text without an end");
}

// The argument block of one lane: values at their natural alignment, floats as doubles.
class Arguments {
 public:
  Arguments(Warp& warp, const Instruction& in, int lane, uint64_t address)
      : warp_(warp), in_(in), lane_(lane), start_(address) {}

  uint64_t take(uint32_t bytes) {
    offset_ = (offset_ + bytes - 1) & ~static_cast<uint64_t>(bytes - 1);
    uint64_t value = 0;
    std::memcpy(&value, warp_.access(in_, lane_, start_ + offset_, bytes, false), bytes);
    offset_ += bytes;
    return value;
  }
  std::string take_text() { return read_text(warp_, in_, lane_, take(8)); }

 private:
  Warp& warp_;
  const Instruction& in_;
  int lane_;
  uint64_t start_;
  uint64_t offset_ = 0;
};

// One conversion, "%-8.3lld" without its length: flags, width and precision, then the letter.
struct Conversion {
  std::string flags;
  bool is_long = false;
  char letter = 0;
};

Conversion parse_conversion(const std::string& format, size_t& at, Arguments& arguments) {
  Conversion conversion;
  conversion.flags = "%";
  for (; at < format.size(); ++at) {
    const char c = format[at];
    if (c == 'l' || c == 'z' || c == 'j' || c == 't') {
      conversion.is_long = true;
    } else if (c == '*') {
      conversion.flags += std::to_string(static_cast<int32_t>(arguments.take(4)));
    } else if (std::strchr("-+ #0.123456789", c)) {
      conversion.flags += c;
    } else if (c != 'h') {
      conversion.letter = c;
      ++at;
      break;
    }
  }
  return conversion;
}

template <class Value>
std::string format_value(const std::string& pattern, Value value) {
  char buffer[512];
  const int length = std::snprintf(buffer, sizeof(buffer), pattern.c_str(), value);
  return std::string(buffer, static_cast<size_t>(length < 0 ? 0 : std::min<int>(length, sizeof(buffer) - 1)));
}

std::string format_conversion(const Conversion& conversion, Arguments& arguments) {
  const std::string flags = conversion.flags;
  switch (conversion.letter) {
    case '%': return "%";
    case 'd':
    case 'i': {
      const uint64_t bits = arguments.take(conversion.is_long ? 8 : 4);
      const int64_t value = conversion.is_long ? static_cast<int64_t>(bits)
                                               : static_cast<int32_t>(static_cast<uint32_t>(bits));
      return format_value(flags + "lld", static_cast<long long>(value));
    }
    case 'u':
    case 'o':
    case 'x':
    case 'X':
      return format_value(flags + "ll" + conversion.letter,
                          static_cast<unsigned long long>(arguments.take(conversion.is_long ? 8 : 4)));
    case 'c': return format_value(flags + "c", static_cast<int>(arguments.take(4)));
    case 'p': return format_value(flags + "p", reinterpret_cast<void*>(arguments.take(8)));
    case 's': {
      const std::string text = arguments.take_text();
      return flags == "%" ? text : format_value(flags + "s", text.c_str());
    }
    case 'f':
    case 'F':
    case 'e':
    case 'E':
    case 'g':
    case 'G':
    case 'a':
    case 'A': return format_value(flags + conversion.letter, bit_cast<double>(arguments.take(8)));
    default: return flags + conversion.letter;  // as the C library does with what it does not know
  }
}

// Operands: format address, argument block address.
Outcome vprintf_lanes(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* formats = warp.read64(in.operands[0]);
  const uint64_t* blocks = warp.read64(in.operands[1]);
  std::string output;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const std::string format = read_text(warp, in, lane, formats[lane]);
    Arguments arguments(warp, in, lane, blocks[lane]);
    for (size_t at = 0; at < format.size();) {
      const char c = format[at++];
      if (c != '%') {
        output.push_back(c);
      } else {
        const Conversion conversion = parse_conversion(format, at, arguments);
        output += format_conversion(conversion, arguments);
      }
    }
  }
  if (warp.simulation->config.print) warp.simulation->config.print(output.data(), output.size());
  return Outcome::kNext;
}

HALFBYTE_HANDLER("vprintf", vprintf_lanes);

}  // namespace

}  // namespace halfbyte::gpu
