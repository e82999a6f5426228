// Events. A record captures what the stream holds at that moment and replaces an earlier record; a
// wait concerns the record that was the latest when it was called, and an event that was never
// recorded is complete: CANN runtime API, aclrtRecordEvent.
#include <condition_variable>
#include <memory>
#include <mutex>

#include "runtime_stream.hpp"

namespace simnpu {
namespace {

class Mark {
 public:
  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
      when_ = Clock::now();
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

  std::optional<Clock::time_point> when() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_ ? std::optional(when_) : std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point when_;
};

class Event {
 public:
  void record(Stream& stream) {
    auto mark = std::make_shared<Mark>();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      latest_ = mark;
      owner_ = &stream.owner;
    }
    stream.always([mark] { mark->reach(); });
  }

  // Null before the first record.
  std::shared_ptr<Mark> latest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return latest_;
  }

  aclError failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return owner_ ? owner_->failure() : ACL_SUCCESS;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> latest_;
  Device* owner_ = nullptr;
};

Event& event_of(aclrtEvent handle) {
  return *static_cast<Event*>(handle);
}

std::optional<Clock::time_point> time_of(aclrtEvent handle) {
  const auto mark = event_of(handle).latest();
  return mark ? mark->when() : std::nullopt;
}

}  // namespace
}  // namespace simnpu

using simnpu::event_of;
using simnpu::stream_of;

SIMNPU_API aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  *event = new simnpu::Event;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) {
  return aclrtCreateEventWithFlag(event, flag);
}

SIMNPU_API aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<simnpu::Event*>(event);
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  event_of(event).record(stream_of(stream));
  return ACL_SUCCESS;
}

// A device has few event registers and has to give them back; here there is nothing to give back.
SIMNPU_API aclError aclrtResetEvent(aclrtEvent, aclrtStream) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  const auto mark = event_of(event).latest();
  if (mark) stream_of(stream).always([mark] { mark->wait(); });
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  const auto mark = event_of(event).latest();
  *status = !mark || mark->when() ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                                  : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  const auto mark = event_of(event).latest();
  *status =
      !mark || mark->when() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSynchronizeEvent(aclrtEvent event) {
  if (const auto mark = event_of(event).latest()) mark->wait();
  return event_of(event).failure();
}

SIMNPU_API aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  const auto from = simnpu::time_of(start);
  const auto to = simnpu::time_of(end);
  if (!from || !to) {
    return simnpu::fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
                        "aclrtEventElapsedTime: an event has not been reached yet");
  }
  *milliseconds = std::chrono::duration<float, std::milli>(*to - *from).count();
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  const auto when = simnpu::time_of(event);
  if (!when) return ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
  *microseconds =
      std::chrono::duration_cast<std::chrono::microseconds>(when->time_since_epoch()).count();
  return ACL_SUCCESS;
}
