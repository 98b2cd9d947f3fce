// What the bindings share: durations, addresses, buffers, Ctrl-C, enums, and Python objects held by native
// threads.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace torchrelay {

using Released = nanobind::call_guard<nanobind::gil_scoped_release>;

// Arrays cross as addresses of memory that the caller keeps alive.
using Address = std::uintptr_t;

template <class T = std::byte>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Negative times are none; the longest is 30 years: later than any deadline, and far from overflow.
template <class Duration>
Duration from_seconds(double seconds) {
  constexpr double kLongest = 1e9;
  const double bounded = seconds > 0 ? (seconds < kLongest ? seconds : kLongest) : 0.0;
  using Period = typename Duration::period;
  return Duration(
      std::llround(bounded * static_cast<double>(Period::den) / static_cast<double>(Period::num)));
}

// Lets Ctrl-C through while a thread of Python waits in native code. Takes the GIL.
void check_signals();

// Keeps a Python object alive; may be dropped by a thread without the GIL. Null for None.
template <class Object>
std::shared_ptr<Object> hold(Object object) {
  if (object.is_none()) return nullptr;
  return std::shared_ptr<Object>(new Object(std::move(object)), [](Object* held) {
    const nanobind::gil_scoped_acquire gil;
    delete held;
  });
}

// A contiguous view of a Python object's memory, for as long as it lives.
class View {
 public:
  explicit View(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nanobind::python_error();
  }
  ~View() { PyBuffer_Release(&buffer_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  const unsigned char* data() const { return static_cast<const unsigned char*>(buffer_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(buffer_.len); }

 private:
  Py_buffer buffer_{};
};

// An enum whose values are 0, 1, ...: `names` are theirs, in order.
template <class Enum, std::size_t count>
void register_enum(nanobind::module_& module, const char* type, const char* doc,
                   const char* const (&names)[count]) {
  nanobind::enum_<Enum> values(module, type, doc);
  for (std::size_t value = 0; value < count; ++value) values.value(names[value], static_cast<Enum>(value));
}

}  // namespace torchrelay
