// Devices. A device is also its only context: torch_npu works with primary contexts alone.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "runtime.hpp"

namespace simnpu {

// The text of this thread's last error, which is then forgotten.
std::string take_error();

// Sets the text and returns the code, for `return fail(...)`.
aclError fail(aclError code, const std::string& text);

class Device {
 public:
  explicit Device(int id) : id(id) {}

  // Keeps the first failure. A failed task stops every stream of its context, not its own alone:
  // CANN runtime API, aclrtSetStreamFailureMode, restrictions (A2, A3).
  void break_down(aclError code, const std::string& text);

  // 0, or the code of the first failure, whose text becomes this thread's error text.
  aclError failure() const;

  const int id;
  std::atomic<bool> active{false};
  std::atomic<std::size_t> bytes_used{0};

 private:
  mutable std::mutex mutex_;
  aclError code_ = ACL_SUCCESS;
  std::string text_;
};

int num_devices();
Device& device(int id);

// The device that this thread has set, or null.
Device* current_device();

}  // namespace simnpu
