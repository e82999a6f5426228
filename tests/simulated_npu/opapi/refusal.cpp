#include "refusal.hpp"

#include <unistd.h>

namespace simnpu::op {

std::string tiling_text(const char* op, const std::string& message) {
  return c10::str("EZ9999: Inner Error!\nEZ9999[PID: ", getpid(), "] (EZ9999):  ", message,
                  "\n        TraceBack (most recent call last):\n       ", op,
                  " do tiling failed, ret is -1.");
}

std::string parameter_text(const std::string& message) {
  return c10::str("EZ1001: [PID: ", getpid(), "] AclNN_Parameter_Error(EZ1001): ", message);
}

std::string shape_text(at::IntArrayRef sizes) {
  return c10::str("[", c10::Join(", ", sizes), "]");
}

}  // namespace simnpu::op
