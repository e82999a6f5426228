// Error texts, faults and what was never written.
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "runtime_device.hpp"

namespace simnpu {
namespace {

thread_local std::string last_error;

}  // namespace

void set_error(const std::string& text) {
  last_error = text;
}

std::string take_error() {
  std::string text;
  text.swap(last_error);
  return text;
}

aclError fail(aclError code, const std::string& text) {
  set_error(text);
  return code;
}

bool fault(const char* name) {
  const char* list = std::getenv("SIMNPU_FAULT");
  std::istringstream faults(list ? list : "");
  for (std::string one; std::getline(faults, one, ',');) {
    if (one == name) return true;
  }
  return false;
}

void unimplemented(const char* name) {
  std::fprintf(stderr, "simnpu: %s was called, but the simulated NPU does not have it\n", name);
  std::fflush(stderr);
  _exit(97);
}

}  // namespace simnpu

// For the generated stubs, which are C.
SIMNPU_API void simnpu_unimplemented(const char* name) {
  simnpu::unimplemented(name);
}

// The pointer stays valid until this thread asks again (CANN runtime API, aclGetRecentErrMsg).
SIMNPU_API const char* aclGetRecentErrMsg() {
  static thread_local std::string text;
  text = simnpu::take_error();
  return text.empty() ? nullptr : text.c_str();
}

// SIMNPU_LOG is the lowest aclLogLevel printed; torch_npu logs every operator at level 1.
SIMNPU_API void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t,
                          const char* format, ...) {
  const char* lowest = std::getenv("SIMNPU_LOG");
  if (!lowest || static_cast<int>(level) < std::atoi(lowest)) return;
  std::fprintf(stderr, "[%s] ", function);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}
