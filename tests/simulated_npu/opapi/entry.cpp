#include "entry.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace simnpu::op {
namespace {

// CPU kernels and nothing above them: the caller's autograd, autocast and Python modes have seen
// this operator already, on its NPU tensors.
class KernelsOnly {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_python_{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

aclnnStatus report(const char* name, int status, const std::string& text) {
  set_error(std::string(name) + ": " + text);
  return status;
}

}  // namespace

void Out::operator=(const Tensor& result) const {
  if (!wanted()) return;
  TORCH_CHECK(view_.sizes() == result.sizes(), "the output has shape ", view_.sizes(),
              ", the result ", result.sizes());
  view_.copy_(result);
}

void Out::shrink_to(const Tensor& result) const {
  const Tensor front = view_.flatten().slice(0, 0, result.numel()).view(result.sizes());
  front.copy_(result);
  if (handle_ != nullptr) handle_->view = front;
}

Tensor Argument<Tensor>::own(Raw raw) {
  if (raw == nullptr) return {};
  if (!raw->invalid.empty()) throw Refused(kInvalidParameter, raw->invalid);
  return raw->view;
}

Tensor Argument<Tensor>::rehearse(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

TensorList Argument<TensorList>::own(Raw raw) {
  TensorList tensors;
  if (raw == nullptr) return tensors;
  for (const aclTensor* tensor : raw->tensors) tensors.push_back(Argument<Tensor>::own(tensor));
  return tensors;
}

TensorList Argument<TensorList>::rehearse(const TensorList& tensors) {
  TensorList metas;
  for (const Tensor& tensor : tensors) metas.push_back(Argument<Tensor>::rehearse(tensor));
  return metas;
}

Scalar Argument<Scalar>::own(Raw raw) {
  if (raw == nullptr) throw Refused(kMissingParameter, "a required scalar is null");
  return raw->value;
}

ScalarList Argument<ScalarList>::own(Raw raw) {
  ScalarList values;
  if (raw == nullptr) return values;
  for (const aclScalar* scalar : raw->scalars) values.push_back(scalar->value);
  return values;
}

aclnnStatus plan(const char* name, uint64_t* workspace_size, aclOpExecutor** executor,
                 const std::function<Work()>& make) {
  *workspace_size = 0;
  *executor = nullptr;
  try {
    KernelsOnly guard;
    *executor = new aclOpExecutor{name, make()};
    return ACL_SUCCESS;
  } catch (const Refused& refused) {
    set_error(refused.what());
    return refused.status;
  } catch (const c10::Error& error) {
    return report(name, kInvalidParameter, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(name, kInvalidParameter, error.what());
  }
}

void rehearse(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::NotImplementedError&) {
    // No meta kernel: the complaint, if there is one, comes from the stream.
  }
}

aclnnStatus launch(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {
  if (executor == nullptr) return kMissingParameter;
  const std::unique_ptr<aclOpExecutor> owned(executor);
  const char* name = owned->name;
  auto task = [name, work = std::move(owned->work)]() -> aclError {
    try {
      KernelsOnly guard;
      work();
      return ACL_SUCCESS;
    } catch (const c10::Error& error) {
      return report(name, kAiCoreError, error.what_without_backtrace());
    } catch (const std::exception& error) {
      return report(name, kAiCoreError, error.what());
    }
  };
  return submit(stream, std::move(task), name);
}

}  // namespace simnpu::op

SIMNPU_API int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return ACL_SUCCESS;
}
