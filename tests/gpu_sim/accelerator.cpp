// What a torch without CUDA asks of CUDA before it runs autograd over tensors of that device: one GPU, streams that are numbers,
// events that hold nothing. Nothing here computes, waits or keeps an order; `recording.py` does. See README.md.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace {

constexpr c10::DeviceType kGpu = c10::DeviceType::CUDA;
thread_local c10::StreamId current_stream = 0;

c10::Stream stream_of(c10::StreamId number) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kGpu, 0), number);
}

struct OneGpu final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kGpu;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  c10::Device getDevice() const override {
    return c10::Device(kGpu, 0);
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override {
    return stream_of(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return stream_of(0);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = stream_of(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static int token = 0;
    *event = &token;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneGpu)

namespace at {

// The registry finds it under this name.
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  int getNumGPUs() const override {
    return 1;
  }
  DeviceIndex deviceCount() const override {
    return 1;
  }
  DeviceIndex current_device() const override {
    return 0;
  }
  DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  DeviceIndex exchangeDevice(DeviceIndex) const override {
    return 0;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override {
    return false;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

// A torch that was built for CPUs never answers "CUDA" here. This definition stands before its own when the library is loaded first.
namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return kGpu;
}
} // namespace accelerator

} // namespace at
