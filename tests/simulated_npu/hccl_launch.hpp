// How a call of HCCL gets onto a stream.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hccl_communicator.hpp"
#include "runtime.hpp"

namespace simnpu::hccl {

struct Region {
  char* data;
  std::size_t bytes;
};

// What the HcclComm handle points to: tasks in flight keep the communicator beyond its destruction.
using Handle = std::shared_ptr<Communicator>;

Handle& handle_of(HcclComm communicator);

// The argument rules that need no other rank; the stream stays healthy when one is broken.
HcclResult refuse(HcclResult code, const std::string& text);
HcclResult check_type(HcclDataType type);
HcclResult check_reduction(HcclDataType type, HcclReduceOp reduction);
HcclResult check_rank(const Communicator& communicator, std::uint32_t rank);

// The collective itself; send is where the data to send lies when it runs.
using Body = std::function<HcclResult(Communicator&, const char* send)>;

// Runs body in the order of the stream, with all regions in device memory. SIMNPU_HCCL_DELAY_MS in
// asynchronous mode holds it back that long, and what it will receive is poisoned before this
// returns: whoever reads it without waiting finds the byte 0xCB, never yesterday's right answer.
HcclResult launch(HcclComm communicator, aclrtStream stream, const char* name, Region send,
                  std::vector<Region> receives, Body body);

}  // namespace simnpu::hccl
