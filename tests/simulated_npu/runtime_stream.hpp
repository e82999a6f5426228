// Streams: tasks in order, on the caller's thread or on a thread of their own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "runtime_device.hpp"

namespace simnpu {

using Task = std::function<aclError()>;
using Clock = std::chrono::steady_clock;

// Absent for the -1 of the ACL calls, which means for ever.
std::optional<Clock::time_point> deadline_after(int32_t milliseconds);

class Stream {
 public:
  explicit Stream(Device& owner);
  ~Stream();  // after its last task
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Runs or enqueues a task that a broken device skips.
  aclError submit(Task task, const char* name);

  // Runs or enqueues an action that a broken device still does: the marks of events.
  void always(std::function<void()> action);

  // Waits for all that was submitted before the call; the device's failure, a time-out, or 0.
  aclError synchronise(int32_t timeout_ms);

  bool idle();

  Device& owner;
  const int32_t id;

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::condition_variable done_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t num_submitted_ = 0;
  std::uint64_t num_finished_ = 0;
  bool closing_ = false;
  std::thread worker_;
};

// The stream behind a handle; null is the default stream of the current device.
Stream& stream_of(aclrtStream handle);

// Every stream of the device.
aclError synchronise_device(Device& owner, int32_t timeout_ms);

}  // namespace simnpu
