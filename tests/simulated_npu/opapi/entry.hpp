// How an operator is written: one line for both C functions that torch_npu looks up by name.
//
//   OPERATOR(aclnnCos, [](Tensor x, Out out) { out = at::cos(x); })
//
// defines aclnnCosGetWorkspaceSize(const aclTensor*, aclTensor*, uint64_t*, aclOpExecutor**) and
// aclnnCos(void*, uint64_t, aclOpExecutor*, aclrtStream). The parameters of the body, in their
// order, are the C arguments; they must be those of op-plugin's EXEC_NPU_CMD(aclnnCos, ...), since
// nothing checks them across dlsym.
//
// The first function checks: it runs the body on meta tensors, so that wrong shapes and types are
// an error of the call, on the calling thread, as with CANN, and no task ever fails for them. The
// second one submits the body to the stream. Everything the body touches is owned by the task,
// because torch_npu destroys the handles as soon as the second function returns.
//
// A body that returns Work checks its own arguments and returns what the stream shall run.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../runtime.hpp"
#include "objects.hpp"

using aclnnStatus = int32_t;

struct aclOpExecutor {
  const char* name;
  std::function<void()> work;
};

namespace simnpu::op {

using at::Scalar;
using at::Tensor;
using TensorList = std::vector<Tensor>;
using ScalarList = std::vector<Scalar>;
using IntArray = std::vector<int64_t>;
using BoolArray = std::vector<uint8_t>;
using MaybeScalar = std::optional<Scalar>;
using Work = std::function<void()>;
using AnyFunction = void (*)();

// aclnn status codes, as seen in public logs and op-plugin.
constexpr int kMissingParameter = 161001;
constexpr int kInvalidParameter = 161002;
constexpr int kTilingFailed = 561002;
constexpr int kInnerNull = 561103;
constexpr int kAiCoreError = 507015;

// A call that CANN's host side turns down: the status, and the text for aclGetRecentErrMsg.
class Refused : public std::runtime_error {
 public:
  Refused(int status, const std::string& text) : std::runtime_error(text), status(status) {}
  const int status;
};

// An output that the caller has allocated with the shape torch_npu inferred; null if not wanted.
class Out {
 public:
  Out(Tensor view, aclTensor* handle) : view_(std::move(view)), handle_(handle) {}

  bool wanted() const { return view_.defined(); }
  const Tensor& view() const { return view_; }

  // Writes a result of this very shape, converted to the output's type.
  void operator=(const Tensor& result) const;

  // Writes a result that only execution could size (nonzero): its values fill the front of the
  // memory and the handle takes its shape, which the caller reads with aclGetViewShape after a
  // synchronise.
  void shrink_to(const Tensor& result) const;

 private:
  Tensor view_;
  aclTensor* handle_;
};

// How the C argument `Raw` becomes a body's parameter T, and what a rehearsal on meta tensors gets.
template <class T>
struct Argument {
  static_assert(std::is_arithmetic_v<T>, "no Argument<> for this parameter type");
  using Raw = T;
  static T own(Raw raw) { return raw; }
  static T rehearse(const T& value) { return value; }
};

template <>
struct Argument<Tensor> {
  using Raw = const aclTensor*;
  static Tensor own(Raw raw);
  static Tensor rehearse(const Tensor& tensor);
};

template <>
struct Argument<Out> {
  using Raw = aclTensor*;
  static Out own(Raw raw) { return {Argument<Tensor>::own(raw), raw}; }
  static Out rehearse(const Out& out) { return {Argument<Tensor>::rehearse(out.view()), nullptr}; }
};

template <>
struct Argument<TensorList> {
  using Raw = const aclTensorList*;
  static TensorList own(Raw raw);
  static TensorList rehearse(const TensorList& tensors);
};

template <>
struct Argument<at::ScalarType> {
  using Raw = aclDataType;
  static at::ScalarType own(Raw raw) { return scalar_type_of(raw); }
  static at::ScalarType rehearse(at::ScalarType type) { return type; }
};

template <>
struct Argument<Scalar> {
  using Raw = const aclScalar*;
  static Scalar own(Raw raw);
  static Scalar rehearse(const Scalar& value) { return value; }
};

template <>
struct Argument<MaybeScalar> {
  using Raw = const aclScalar*;
  static MaybeScalar own(Raw raw) { return raw ? MaybeScalar(raw->value) : std::nullopt; }
  static MaybeScalar rehearse(const MaybeScalar& value) { return value; }
};

template <>
struct Argument<ScalarList> {
  using Raw = const aclScalarList*;
  static ScalarList own(Raw raw);
  static ScalarList rehearse(const ScalarList& values) { return values; }
};

template <>
struct Argument<IntArray> {
  using Raw = const aclIntArray*;
  static IntArray own(Raw raw) { return raw ? raw->values : IntArray(); }
  static IntArray rehearse(const IntArray& values) { return values; }
};

template <>
struct Argument<BoolArray> {
  using Raw = const aclBoolArray*;
  static BoolArray own(Raw raw) { return raw ? raw->values : BoolArray(); }
  static BoolArray rehearse(const BoolArray& values) { return values; }
};

template <>
struct Argument<std::string> {
  using Raw = const char*;
  static std::string own(Raw raw) { return raw ? raw : ""; }
  static std::string rehearse(const std::string& text) { return text; }
};

// The first function's common part: turns an exception of `make` into a status and a text.
aclnnStatus plan(const char* name, uint64_t* workspace_size, aclOpExecutor** executor,
                 const std::function<Work()>& make);

// Runs `body`, which sees only meta tensors, for its complaints; an operator without a meta kernel
// has none.
void rehearse(const std::function<void()>& body);

// The second function, the same for every operator.
aclnnStatus launch(void* workspace, uint64_t workspace_size, aclOpExecutor* executor,
                   aclrtStream stream);

// The first function of all operators of one signature; each has a shim below that adds its name
// and body.
template <class Result, class... Params>
aclnnStatus plan_body(const char* name, Result (*body)(Params...),
                      typename Argument<std::decay_t<Params>>::Raw... raw, uint64_t* workspace_size,
                      aclOpExecutor** executor) {
  return plan(name, workspace_size, executor, [&]() -> Work {
    auto owned = std::make_tuple(Argument<std::decay_t<Params>>::own(raw)...);
    if constexpr (std::is_same_v<Result, Work>) {
      return std::apply(body, std::move(owned));
    } else {
      rehearse([&] {
        std::apply(
            [&](const auto&... value) { body(Argument<std::decay_t<Params>>::rehearse(value)...); },
            owned);
      });
      return [body, owned = std::move(owned)] { std::apply(body, owned); };
    }
  });
}

template <class Operator, class Signature>
struct Entry;

template <class Operator, class Body, class Result, class... Params>
struct Entry<Operator, Result (Body::*)(Params...) const> {
  static aclnnStatus get_workspace_size(typename Argument<std::decay_t<Params>>::Raw... raw,
                                        uint64_t* workspace_size, aclOpExecutor** executor) {
    return plan_body<Result, Params...>(Operator::name, Operator::body, raw..., workspace_size,
                                        executor);
  }
};

}  // namespace simnpu::op

// The C symbols are indirect functions: dlsym calls the resolver and returns what it names, so that
// the argument list is deduced from the body instead of being written a second time.
#define OPERATOR(symbol, ...)                                                         \
  namespace {                                                                         \
  struct symbol##_operator {                                                          \
    static constexpr const char* name = #symbol;                                      \
    static constexpr auto body = __VA_ARGS__;                                         \
    using Signature = decltype(&std::remove_cv_t<decltype(body)>::operator());        \
  };                                                                                  \
  }                                                                                   \
  extern "C" {                                                                        \
  simnpu::op::AnyFunction resolve_##symbol##_plan() {                                 \
    using Entry = simnpu::op::Entry<symbol##_operator, symbol##_operator::Signature>; \
    return reinterpret_cast<simnpu::op::AnyFunction>(&Entry::get_workspace_size);     \
  }                                                                                   \
  simnpu::op::AnyFunction resolve_##symbol##_launch() {                               \
    return reinterpret_cast<simnpu::op::AnyFunction>(&simnpu::op::launch);            \
  }                                                                                   \
  SIMNPU_EXPORT void symbol##GetWorkspaceSize()                                       \
      __attribute__((ifunc("resolve_" #symbol "_plan")));                             \
  SIMNPU_EXPORT void symbol() __attribute__((ifunc("resolve_" #symbol "_launch")));   \
  }
