// A CUDA device in the host's memory, for torch's CPU build: tensors that say they are on `cuda:0`, with real values.
//
// Every operator on such tensors runs as the CPU's, on tensors of the CPU that share their memory. There is one device
// with one stream. The library is loaded before torch is imported, because torch looks for the hooks once.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using c10::Stream;

const Device card(DeviceType::CUDA, 0), host(DeviceType::CPU);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return card.type(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return card; }
  Device exchangeDevice(Device) const override { return card; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, card); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, card); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, card); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

struct Memory final : c10::Allocator {
  DataPtr allocate(size_t size) override {
    void* data = size ? std::calloc(size, 1) : nullptr;
    return {data, data, &std::free, card};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

const Guard guard;
const c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);
Memory memory;
const bool allocates = (c10::SetAllocator(DeviceType::CUDA, &memory), true);

// Memory of another storage, which lives as long as this one, as memory of `device`.
Storage shared(const Storage& other, Device device) {
  auto* owner = new Storage(other);
  DataPtr data(other.mutable_data(), owner, [](void* one) { delete static_cast<Storage*>(one); }, device);
  return Storage(Storage::use_byte_size_t(), other.nbytes(), std::move(data), c10::GetAllocator(device.type()), true);
}

Tensor tensor_of(Storage storage, const Tensor& like, c10::DispatchKey key) {
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// One call: storages of the device and those of the host that share their memory, and tensors that were given.
struct Call {
  std::unordered_map<StorageImpl*, Storage> on_host, on_card;
  std::vector<std::pair<Tensor, Tensor>> given;

  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    StorageImpl* own = tensor.storage().unsafeGetStorageImpl();
    auto found = on_host.find(own);
    if (found == on_host.end()) {
      found = on_host.emplace(own, shared(tensor.storage(), host)).first;
      on_card.emplace(found->second.unsafeGetStorageImpl(), tensor.storage());
    }
    Tensor made = tensor_of(found->second, tensor, c10::DispatchKey::CPU);
    given.emplace_back(tensor, made);
    return made;
  }

  Tensor to_card(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [mine, same] : given)
      if (same.is_same(tensor)) return mine;
    StorageImpl* own = tensor.storage().unsafeGetStorageImpl();
    auto found = on_card.find(own);
    if (found == on_card.end()) found = on_card.emplace(own, shared(tensor.storage(), card)).first;
    return tensor_of(found->second, tensor, c10::DispatchKey::CUDA);
  }

  // Operators may give tensors that they write another size.
  void resize() {
    for (auto& [mine, same] : given) {
      if (mine.sizes() == same.sizes()) continue;
      mine.unsafeGetTensorImpl()->set_storage_keep_dtype(shared(same.storage(), card));
      mine.unsafeGetTensorImpl()->set_sizes_and_strides(same.sizes(), same.strides(), same.storage_offset());
    }
  }

  IValue each(const IValue& value, bool back) {
    auto move = [&](const Tensor& tensor) { return back ? to_card(tensor) : to_host(tensor); };
    if (value.isTensor()) return move(value.toTensor());
    if (value.isDevice() && !back) return host;
    if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (const Tensor& tensor : value.toTensorVector()) moved.push_back(move(tensor));
      return moved;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> moved;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList())
        moved.push_back(tensor ? std::optional<Tensor>(move(*tensor)) : std::nullopt);
      return moved;
    }
    return value;
  }
};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t place = first; place < stack->size(); ++place) (*stack)[place] = call.each((*stack)[place], false);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resize();
  for (size_t place = first; place < stack->size(); ++place) (*stack)[place] = call.each((*stack)[place], true);
}

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

// torch has these for all devices, in a form that looks for a kernel of the device.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run>());
}
