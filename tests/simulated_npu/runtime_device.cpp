// Devices, contexts and what the machine says about itself.
#include "runtime_device.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>

#include "runtime_stream.hpp"

namespace simnpu {
namespace {

constexpr int kMaxDevices = 64;
thread_local Device* current = nullptr;

std::string setting(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value ? value : fallback;
}

// ASCEND_RT_VISIBLE_DEVICES is read up to its first entry that is no number, is no device or does
// not ascend ("1, 2" reads as 1): CANN environment variable reference.
int count_visible(const std::string& list, int installed) {
  std::istringstream entries(list);
  int count = 0;
  int last = -1;
  for (std::string entry; std::getline(entries, entry, ',');) {
    if (entry.empty() || entry.find_first_not_of("0123456789") != std::string::npos) break;
    const int id = std::atoi(entry.c_str());
    if (id <= last || id >= installed) break;
    last = id;
    ++count;
  }
  return count;
}

}  // namespace

int num_devices() {
  static const int count = [] {
    const int installed = std::min(kMaxDevices, std::atoi(setting("SIMNPU_DEVICES", "8").c_str()));
    const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
    return visible ? count_visible(visible, installed) : installed;
  }();
  return count;
}

Device& device(int id) {
  // Never destroyed: streams' threads may outlive the statics of this library.
  static auto& devices = *new std::array<std::unique_ptr<Device>, kMaxDevices>([] {
    std::array<std::unique_ptr<Device>, kMaxDevices> all;
    for (int i = 0; i < kMaxDevices; ++i) all[i] = std::make_unique<Device>(i);
    return all;
  }());
  return *devices.at(id);
}

Device* current_device() {
  return current;
}

void Device::break_down(aclError code, const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (code_ != ACL_SUCCESS) return;
  code_ = code;
  text_ = text;
}

aclError Device::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (code_ != ACL_SUCCESS) set_error(text_);
  return code_;
}

}  // namespace simnpu

using simnpu::fail;

SIMNPU_API aclError aclInit(const char*) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclFinalize() {
  return ACL_SUCCESS;
}

// An A3 training die, unless SIMNPU_SOC says otherwise: op-plugin chooses operators by this name.
SIMNPU_API const char* aclrtGetSocName() {
  static const std::string name = simnpu::setting("SIMNPU_SOC", "Ascend910_9391");
  return name.c_str();
}

SIMNPU_API aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  const std::string text = simnpu::setting("SIMNPU_CANN", "8.3.RC1");
  std::strncpy(version->version, text.c_str(), sizeof version->version - 1);
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, simnpu::setting("SIMNPU_CANN", "8.3.RC1").c_str());
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(simnpu::num_devices());
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSetDevice(int32_t id) {
  if (id < 0 || id >= simnpu::num_devices()) {
    return fail(ACL_ERROR_RT_INVALID_DEVICEID, "aclrtSetDevice: device " + std::to_string(id) +
                                                   " of " + std::to_string(simnpu::num_devices()));
  }
  simnpu::current = &simnpu::device(id);
  simnpu::current->active = true;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetDevice(int32_t* id) {
  if (!simnpu::current) return ACL_ERROR_RT_CONTEXT_NULL;
  *id = simnpu::current->id;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtResetDevice(int32_t) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (!simnpu::current) return ACL_ERROR_RT_CONTEXT_NULL;
  *context = simnpu::current;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSetCurrentContext(aclrtContext context) {
  simnpu::current = static_cast<simnpu::Device*>(context);
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetPrimaryCtxState(int32_t id, uint32_t*, int32_t* active) {
  *active = simnpu::device(id).active;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) {
  return ACL_SUCCESS;
}

// The number of AI cores of an A3 die.
SIMNPU_API aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

// Settings that change nothing here: no saturation, no watchdog of single operators.
SIMNPU_API aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSetOpExecuteTimeOut(uint32_t) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSetOpWaitTimeout(uint32_t) {
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtPeekAtLastError(aclrtLastErrLevel) {
  return simnpu::current ? simnpu::current->failure() : ACL_SUCCESS;
}

SIMNPU_API aclError aclrtGetLastError(aclrtLastErrLevel) {
  return simnpu::current ? simnpu::current->failure() : ACL_SUCCESS;
}

namespace {

std::map<aclSysParamOpt, int64_t>& system_options() {
  static std::map<aclSysParamOpt, int64_t> options;
  return options;
}

}  // namespace

SIMNPU_API aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  *value = system_options()[option];
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  system_options()[option] = value;
  return ACL_SUCCESS;
}

SIMNPU_API aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

// The AscendC kernels inside the wheel register themselves at import and are never launched.
SIMNPU_API int rtDevBinaryRegister(const void*, void** handle) {
  static int registered;
  *handle = &registered;
  return 0;
}

SIMNPU_API int rtFunctionRegister(void*, const void*, const void*, const void*, uint32_t) {
  return 0;
}
