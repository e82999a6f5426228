// What the simulated runtime (libascendcl.so) offers to the libraries beside it.
//
// A library uses it like this:
//
//   #include "runtime.hpp"  // link with -l:libascendcl.so
//
//   SIMNPU_API int aclnnAbsGetWorkspaceSize(const aclTensor* x, aclTensor* out, ...) {
//     if (wrong) {  // an argument rule: on the host, the stream stays healthy
//       simnpu::set_error("aclnnAbs: what was wrong, the values, the rule");
//       return 161002;
//     }
//   }
//   SIMNPU_API int aclnnAbs(void*, uint64_t, aclOpExecutor* run, aclrtStream stream) {
//     auto work = take_work(run);  // owns all it touches: the caller frees aclTensors at once
//     return simnpu::submit(stream, [work] { return work(); }, "aclnnAbs");
//   }
//
// A task that fails calls set_error (on the thread that runs it) and returns a code other than 0,
// or throws. From then on its device is broken, as after the stop on failure that torch_npu asks
// for: later tasks run on none of its streams; submit and every synchronise return the first
// failure and set its text. SIMNPU_ASYNC=1 gives every stream a worker thread; without it a task
// runs inside submit. Tasks read and write device memory directly: it is ordinary memory of this
// process, filled with the byte 0xCB when allocated.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "acl/acl.h"

#define SIMNPU_EXPORT __attribute__((visibility("default")))
#define SIMNPU_API extern "C" SIMNPU_EXPORT

namespace simnpu {

// Text that this thread's next aclGetRecentErrMsg returns; torch_npu appends it to its
// RuntimeError.
SIMNPU_EXPORT void set_error(const std::string& text);

// The device whose memory holds all of [pointer, pointer + bytes), or -1.
SIMNPU_EXPORT int device_of(const void* pointer, std::size_t bytes);

// Runs task in the order of the stream (a null stream: the default one of the current device).
// Synchronous mode returns the task's own status, asynchronous mode 0; both return the device's
// first failure, without running the task, once there is one.
SIMNPU_EXPORT aclError submit(aclrtStream stream, std::function<aclError()> task, const char* name);

// True when SIMNPU_ASYNC=1 gives every stream its own thread.
SIMNPU_EXPORT bool asynchronous();

// True when the comma separated list in SIMNPU_FAULT names this fault, read at every call.
SIMNPU_EXPORT bool fault(const char* name);

// Ends the process with status 97 and the name: an entry that nobody wrote never answers 0.
[[noreturn]] SIMNPU_EXPORT void unimplemented(const char* name);

}  // namespace simnpu
