#include "runtime_stream.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <set>
#include <utility>

namespace simnpu {
namespace {

std::atomic<int32_t> next_id{0};

struct Registry {
  std::mutex mutex;
  std::set<Stream*> streams;
};

// Never destroyed: see device().
Registry& registry() {
  static auto& all = *new Registry;
  return all;
}

void run(Device& owner, const Task& task, const char* name) {
  set_error("");
  aclError code;
  try {
    code = task();
  } catch (const std::exception& error) {
    code = fail(ACL_ERROR_RT_AICORE_EXCEPTION, std::string(name) + ": " + error.what());
  }
  if (code == ACL_SUCCESS) return;
  const std::string text = take_error();
  owner.break_down(code, text.empty() ? std::string(name) + " failed" : text);
}

}  // namespace

bool asynchronous() {
  static const bool chosen = [] {
    const char* value = std::getenv("SIMNPU_ASYNC");
    return value && std::strcmp(value, "1") == 0;
  }();
  return chosen;
}

aclError submit(aclrtStream stream, Task task, const char* name) {
  if (!stream && !current_device()) return fail(ACL_ERROR_RT_CONTEXT_NULL, "no device is set");
  return stream_of(stream).submit(std::move(task), name);
}

std::optional<Clock::time_point> deadline_after(int32_t milliseconds) {
  if (milliseconds < 0) return std::nullopt;
  return Clock::now() + std::chrono::milliseconds(milliseconds);
}

Stream::Stream(Device& owner) : owner(owner), id(++next_id) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams.insert(this);
  if (asynchronous()) worker_ = std::thread([this] { work(); });
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    registry().streams.erase(this);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  arrived_.notify_all();
  if (worker_.joinable()) worker_.join();
}

void Stream::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    arrived_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    {
      // The action may hold the last reference to memory: gone before the task counts as finished.
      const std::function<void()> action = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      action();
    }
    lock.lock();
    ++num_finished_;
    done_.notify_all();
  }
}

void Stream::always(std::function<void()> action) {
  if (!asynchronous()) return action();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(action));
    ++num_submitted_;
  }
  arrived_.notify_one();
}

aclError Stream::submit(Task task, const char* name) {
  if (const aclError code = owner.failure()) return code;
  if (!asynchronous()) {
    run(owner, task, name);
    return owner.failure();
  }
  always([this, task = std::move(task), name] {
    if (owner.failure() == ACL_SUCCESS) run(owner, task, name);
  });
  return ACL_SUCCESS;
}

aclError Stream::synchronise(int32_t timeout_ms) {
  const auto deadline = deadline_after(timeout_ms);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto reached = [this, target = num_submitted_] { return num_finished_ >= target; };
  if (!deadline) {
    done_.wait(lock, reached);
  } else if (!done_.wait_until(lock, *deadline, reached)) {
    return fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream " + std::to_string(id) +
                                                      " has not finished after " +
                                                      std::to_string(timeout_ms) + " ms");
  }
  lock.unlock();
  return owner.failure();
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_finished_ == num_submitted_;
}

Stream& stream_of(aclrtStream handle) {
  if (handle) return *static_cast<Stream*>(handle);
  if (!current_device()) unimplemented("the default stream of a thread that has set no device");
  static std::mutex mutex;
  static auto& defaults = *new std::map<Device*, Stream*>;
  std::lock_guard<std::mutex> lock(mutex);
  Stream*& stream = defaults[current_device()];
  if (!stream) stream = new Stream(*current_device());
  return *stream;
}

aclError synchronise_device(Device& owner, int32_t timeout_ms) {
  std::set<Stream*> streams;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    streams = registry().streams;
  }
  for (Stream* stream : streams) {
    if (&stream->owner != &owner) continue;
    if (const aclError code = stream->synchronise(timeout_ms)) return code;
  }
  return owner.failure();
}

}  // namespace simnpu

using simnpu::Stream;
using simnpu::stream_of;

SIMNPU_API aclError aclrtCreateStream(aclrtStream* stream) {
  if (!simnpu::current_device()) return ACL_ERROR_RT_CONTEXT_NULL;
  *stream = new Stream(*simnpu::current_device());
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  return aclrtCreateStream(stream);
}

SIMNPU_API aclError aclrtDestroyStream(aclrtStream stream) {
  delete static_cast<Stream*>(stream);
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtDestroyStreamForce(aclrtStream stream) {
  return aclrtDestroyStream(stream);
}

// torch_npu asks for ACL_STOP_ON_FAILURE on every stream; nothing else is modelled.
SIMNPU_API aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t mode) {
  if (mode == ACL_STOP_ON_FAILURE) return ACL_SUCCESS;
  return simnpu::fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
                      "aclrtSetStreamFailureMode: the simulated NPU only stops on failure");
}

SIMNPU_API aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream).id;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  Stream& asked = stream_of(stream);
  *status = asked.idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return asked.owner.failure();
}

SIMNPU_API aclError aclrtSynchronizeStream(aclrtStream stream) {
  return stream_of(stream).synchronise(-1);
}

SIMNPU_API aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  return stream_of(stream).synchronise(timeout_ms);
}

SIMNPU_API aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  if (!simnpu::current_device()) return ACL_ERROR_RT_CONTEXT_NULL;
  return simnpu::synchronise_device(*simnpu::current_device(), timeout_ms);
}

SIMNPU_API aclError aclrtSynchronizeDevice() {
  return aclrtSynchronizeDeviceWithTimeout(-1);
}
