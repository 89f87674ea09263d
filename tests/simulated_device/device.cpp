// A simulated accelerator under the PrivateUse1 key: streams, events, and an allocator that reuses and poisons memory.
//
// A stream is a thread that runs its tasks in order, each after a delay. A kernel is a Python callable, which the
// dispatcher of `__init__.py` queues. Memory is host memory that only kernels read and write.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace py = pybind11;
constexpr auto KEY = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KEY, 0);
constexpr int POISON = 0xff;  // NaN in every floating-point dtype, -1 in signed integers

// ---- streams and events; none is ever destroyed, because their threads outlive the interpreter

struct Stream {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  uint64_t queued = 0, finished = 0;
  std::string error;  // of the first kernel that failed
  double delay = -1;  // seconds before each kernel; negative: the device's
  const int64_t id;

  explicit Stream(int64_t id) : id(id) {
    std::thread([this] { serve(); }).detach();
  }

  void serve() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
      task = nullptr;
      std::lock_guard lock(mutex);
      ++finished;
      changed.notify_all();
    }
  }

  uint64_t push(std::function<void()> task) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
    return ++queued;
  }

  void wait(uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return finished >= number; });
  }

  bool over(uint64_t number) {
    std::lock_guard lock(mutex);
    return finished >= number;
  }

  uint64_t last() {
    std::lock_guard lock(mutex);
    return queued;
  }
};

struct Mark {  // an event: all that was queued on a stream until now
  Stream* stream;
  uint64_t number;
};

struct Device {
  std::mutex mutex;
  std::vector<Stream*> streams{new Stream(0)};
  std::atomic<double> delay{0};
  PyObject* on_sync = nullptr;  // called with the kind of a host synchronisation

  Stream* add() {
    std::lock_guard lock(mutex);
    streams.push_back(new Stream(static_cast<int64_t>(streams.size())));
    return streams.back();
  }
  Stream* at(int64_t id) {
    std::lock_guard lock(mutex);
    return streams.at(id);
  }
};
Device& device = *new Device;
thread_local int64_t current = 0;

Mark mark(int64_t id) {
  auto* stream = device.at(id);
  return {stream, stream->last()};
}

void block(int64_t id, Mark m) {
  device.at(id)->push([m] { m.stream->wait(m.number); });
}

void wait_for(Mark m) {  // makes the host wait; raises the error of a kernel
  if (PyGILState_Check()) {
    py::gil_scoped_release none;
    m.stream->wait(m.number);
  } else {
    m.stream->wait(m.number);
  }
  std::lock_guard lock(m.stream->mutex);
  TORCH_CHECK(m.stream->error.empty(), "simulated device: ", std::exchange(m.stream->error, ""));
}

void synchronize(Mark m, const char* kind) {  // the same, counted
  {
    py::gil_scoped_acquire gil;
    if (device.on_sync != nullptr) py::handle(device.on_sync)(kind);
  }
  wait_for(m);
}

void launch(int64_t id, py::function kernel) {
  auto* stream = device.at(id);
  PyObject* held = kernel.release().ptr();
  stream->push([stream, held] {
    double seconds = stream->delay < 0 ? device.delay.load() : stream->delay;
    if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    py::gil_scoped_acquire gil;
    try {
      py::reinterpret_steal<py::function>(held)();
    } catch (const std::exception& error) {
      std::string said = error.what();  // runs Python code, in which another thread may take the GIL and wait for the mutex
      std::lock_guard lock(stream->mutex);
      if (stream->error.empty()) stream->error = said;
    }
  });
}

// ---- memory: a freed block is poisoned in the order of its stream and is the next one that is handed out there

struct Block {
  void* memory;
  size_t size;
  int64_t stream;
  std::vector<int64_t> used;  // other streams, by record_stream
  bool captured = false;      // allocated during a capture: it belongs to the graph, and is never handed out again
};

struct Memory final : c10::Allocator {
  std::mutex mutex;
  std::unordered_map<void*, Block> lent;
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> idle;
  std::vector<std::pair<Block, std::vector<Mark>>> pending;  // freed, and still in use on another stream
  std::atomic<int64_t> reused{0};
  bool capturing = false;
  std::vector<std::pair<uintptr_t, size_t>> freed;  // of the graph that is being captured, and not noted there yet

  static size_t rounded(size_t n) {
    size_t size = 64;
    while (size < n) size *= 2;
    return size;
  }

  void retire(const Block& block) {
    device.at(block.stream)->push([block] { memset(block.memory, POISON, block.size); });
    idle[{block.stream, block.size}].push_back(block.memory);
  }

  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &release, DEVICE};
    std::lock_guard lock(mutex);
    for (auto it = pending.begin(); it != pending.end();) {
      bool over = std::all_of(it->second.begin(), it->second.end(), [](Mark m) { return m.stream->over(m.number); });
      if (over) retire(it->first);
      it = over ? pending.erase(it) : it + 1;
    }
    Block block{nullptr, rounded(n), current, {}, capturing};
    if (capturing) {
      block.memory = aligned_alloc(64, block.size);
      memset(block.memory, POISON, block.size);
      lent[block.memory] = block;
      return {block.memory, block.memory, &release, DEVICE};
    }
    auto& free = idle[{current, block.size}];
    if (free.empty()) {
      block.memory = aligned_alloc(64, block.size);
      memset(block.memory, POISON, block.size);
    } else {
      block.memory = free.back();
      free.pop_back();
      ++reused;
    }
    lent[block.memory] = block;
    return {block.memory, block.memory, &release, DEVICE};
  }

  void record(void* memory, int64_t stream) {
    std::lock_guard lock(mutex);
    auto found = lent.find(memory);
    if (found != lent.end() && found->second.stream != stream) found->second.used.push_back(stream);
  }

  static void release(void* memory);
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
};
Memory& memory = *new Memory;

void Memory::release(void* address) {
  if (address == nullptr) return;
  std::lock_guard lock(memory.mutex);
  auto found = memory.lent.find(address);
  Block block = found->second;
  memory.lent.erase(found);
  if (block.captured) {
    if (memory.capturing) memory.freed.emplace_back(reinterpret_cast<uintptr_t>(address), block.size);
    return;
  }
  if (block.used.empty()) return memory.retire(block);
  std::vector<Mark> marks;
  for (int64_t stream : block.used) marks.push_back(mark(stream));
  memory.pending.emplace_back(block, marks);
}

// ---- what torch asks of a device: its streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KEY; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(device.add()->id); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(device.add()->id); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }
  bool queryStream(const c10::Stream& s) const override {
    auto m = mark(s.id());
    return m.stream->over(m.number);
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(mark(s.id()), "synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    size_t n = device.streams.size();
    for (size_t id = 0; id < n; ++id) synchronize(mark(id), "synchronize");
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(s.id());
  }
  void block(void* event, const c10::Stream& s) const override { ::block(s.id(), *static_cast<Mark*>(event)); }
  bool queryEvent(void* event) const override {
    auto* m = static_cast<Mark*>(event);
    return m == nullptr || m->stream->over(m->number);
  }
  void synchronizeEvent(void* event) const override { synchronize(*static_cast<Mark*>(event), "synchronize"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    memory.record(data.get(), s.id());
  }
};

// ---- tensors

// An uninitialised tensor with the sizes, strides and dtype of another one.
at::Tensor empty_like(const at::Tensor& x) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(x.sizes(), x.strides(), &memory, keys, x.scalar_type());
}

// The same memory as a CPU tensor, for kernels. It does not keep the memory alive, as a pointer does not.
at::Tensor raw(const at::Tensor& x) {
  auto* base = static_cast<char*>(x.storage().data_ptr().get());
  void* start = base == nullptr ? nullptr : base + x.storage_offset() * x.itemsize();
  return at::from_blob(start, x.sizes(), x.strides(), at::TensorOptions().dtype(x.scalar_type()));
}

// The sizes and strides of another tensor; a storage that is too small gets fresh memory.
void resize_as(const at::Tensor& x, const at::Tensor& wanted) {
  auto size = wanted.sizes(), stride = wanted.strides();
  size_t bytes = at::detail::computeStorageNbytes(size, stride, x.itemsize(), x.storage_offset());
  auto* storage = x.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(memory.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
}

PYBIND11_MODULE(_simulated_device, m) {
  m.def("install", [](py::function on_sync) {
    device.on_sync = on_sync.release().ptr();
    c10::impl::DeviceGuardImplRegistrar registrar(KEY, new Guard);
  });
  m.def("empty_like", &empty_like);
  m.def("raw", &raw);
  m.def("resize_as", &resize_as);
  m.def("launch", &launch);
  m.def("launch_here", [](py::function kernel) { launch(current, std::move(kernel)); });
  m.def("synchronize_here", [](const std::string& kind) { synchronize(mark(current), kind.c_str()); });
  m.def("settle", [] {  // wait for every stream, uncounted
    for (size_t id = 0; id < device.streams.size(); ++id) wait_for(mark(id));
  });
  m.def("new_stream", [] { return device.add()->id; });
  m.def("current_stream", [] { return current; });
  m.def("set_delay", [](double seconds) { device.delay = seconds; });
  m.def("set_stream_delay", [](int64_t id, double seconds) { device.at(id)->delay = seconds; });
  m.def("record_stream", [](const at::Tensor& x, int64_t id) { memory.record(x.storage().data_ptr().get(), id); });
  m.def("reused", [] { return memory.reused.load(); });
  m.def("set_capturing", [](bool on) {
    std::lock_guard lock(memory.mutex);
    memory.capturing = on;
  });
  m.def("take_freed", [] {
    std::lock_guard lock(memory.mutex);
    return std::exchange(memory.freed, {});
  });
  m.def("poison", [](uintptr_t address, size_t size) { memset(reinterpret_cast<void*>(address), POISON, size); });
  py::class_<Mark>(m, "Mark").def_property_readonly("over", [](Mark m) { return m.stream->over(m.number); });
  m.def("mark", &mark);
  m.def("block", &block);
}
