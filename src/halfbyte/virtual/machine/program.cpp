// The table of handlers, and programs made from the arrays that Python fills.
#include "machine/program.h"

#include <algorithm>
#include <map>

namespace halfbyte::gpu {

namespace {
// A function-local table, so that registrations of any translation unit may run first.
std::map<std::string, Handler>& handler_table() {
  static std::map<std::string, Handler> table;
  return table;
}
}  // namespace

HandlerRegistration::HandlerRegistration(const char* name, Handler handler) {
  handler_table()[name] = handler;
}

Handler find_handler(const std::string& name) {
  auto found = handler_table().find(name);
  return found == handler_table().end() ? nullptr : found->second;
}

std::vector<std::string> list_handlers() {
  std::vector<std::string> names;
  for (const auto& entry : handler_table()) names.push_back(entry.first);
  return names;
}

}  // namespace halfbyte::gpu
