#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "convert.h"
#include "core/error.h"
#include "group/call_rows.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

void write_bytes(CallRows& rows, std::uint64_t digest, Address address, std::size_t size_bytes) {
  rows.write(digest, {pointer(address), size_bytes});
}

void write_numbers(CallRows& rows, std::uint64_t digest, const std::vector<std::int64_t>& numbers) {
  rows.write(digest, std::as_bytes(std::span(numbers)));
}

std::vector<std::vector<std::int64_t>> numbers(const CallRows& rows, std::size_t count) {
  if (count > rows.payload_bytes() / sizeof(std::int64_t))
    throw Error(Code::kArgument, "that many numbers do not fit into a row");
  std::vector<std::vector<std::int64_t>> result;
  for (int rank = 0; rank < rows.ranks(); ++rank) {
    const auto* first = reinterpret_cast<const std::int64_t*>(rows.payload(rank));
    result.emplace_back(first, first + count);
  }
  return result;
}

std::uint64_t digest(const CallRows& rows, int rank) {
  if (rank < 0 || rank >= rows.ranks()) throw nb::index_error();
  return rows.digest(rank);
}

}  // namespace

void register_call_rows(nb::module_& module) {
  nb::class_<CallRows>(module, "CallRows",
                       "Rows that ranks exchange with each collective: a digest of the call, then a payload.")
      .def(nb::init<int, std::size_t>(), "ranks"_a, "payload_bytes"_a)
      .def_prop_ro("row_bytes", &CallRows::row_bytes)
      .def_prop_ro(
          "sent", [](CallRows& rows) { return reinterpret_cast<Address>(rows.sent()); },
          "The address of the row to send.")
      .def_prop_ro(
          "received", [](CallRows& rows) { return reinterpret_cast<Address>(rows.received()); },
          "The address of the rows of all ranks, in their order.")
      .def("write_bytes", &write_bytes, "digest"_a, "address"_a, "size_bytes"_a,
           "Fills the row to send with a copy of the payload at an address.")
      .def("write_numbers", &write_numbers, "digest"_a, "numbers"_a,
           "Fills the row to send with 64-bit integers as its payload.")
      .def("first_difference", &CallRows::first_difference,
           "The first rank whose digest is not the one that was sent; -1 if there is none.")
      .def("digest", &digest, "rank"_a, "What a rank sent.")
      .def("numbers", &numbers, "count"_a, "The first integers of each rank's payload.")
      .def(
          "reduce",
          [](const CallRows& rows, Dtype dtype, Op op, Address out, std::size_t count) {
            rows.reduce(dtype, op, pointer(out), count);
          },
          "dtype"_a, "op"_a, "out"_a, "count"_a, "Reduces the payloads in the order of ranks, into `out`.");
}

}  // namespace torchrelay
