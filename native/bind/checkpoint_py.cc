#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <system_error>
#include <utility>
#include <vector>

#include "convert.h"
#include "core/crc32c.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

std::uint32_t checksum(nb::handle data, std::uint32_t crc) {
  const View view(data);
  nb::gil_scoped_release release;
  return crc32c(crc, view.data(), view.size());
}

nb::bytes block_checksums(nb::handle data, std::size_t block_bytes) {
  if (block_bytes == 0) throw nb::value_error("block_bytes must be at least 1");
  const View view(data);
  std::vector<std::uint32_t> checksums((view.size() + block_bytes - 1) / block_bytes);
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      const std::size_t start = i * block_bytes;
      checksums[i] = crc32c(0, view.data() + start, std::min(block_bytes, view.size() - start));
    }
  }
  return nb::bytes(checksums.data(), checksums.size() * sizeof(std::uint32_t));
}

using Sizes = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Rows of starts, sizes and addresses.
using Copies = nb::ndarray<const std::uint64_t, nb::shape<3, -1>, nb::c_contig, nb::device::cpu>;

std::pair<nb::bytes, std::uint64_t> file_checksums(int fd, const Sizes& starts, const Sizes& sizes,
                                                   const std::optional<Copies>& into) {
  if (starts.size() != sizes.size()) throw nb::value_error("starts and sizes must have one length");
  std::vector<std::uint32_t> checksums(starts.size());
  std::vector<FileCopy> copies;
  for (std::size_t i = 0; into && i < into->shape(1); ++i) {
    copies.push_back({(*into)(0, i), (*into)(1, i), (*into)(2, i)});
  }
  std::uint64_t end = 0;
  try {
    nb::gil_scoped_release release;
    end = crc32c_of_file(fd, {starts.data(), starts.size()}, {sizes.data(), sizes.size()}, checksums, copies);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return {nb::bytes(checksums.data(), checksums.size() * sizeof(std::uint32_t)), end};
}

nb::bytes memory_checksums(const Sizes& addresses, const Sizes& sizes) {
  if (addresses.size() != sizes.size()) throw nb::value_error("addresses and sizes must have one length");
  std::vector<std::uint32_t> checksums(sizes.size());
  {
    nb::gil_scoped_release release;
    for (std::size_t i = 0; i < checksums.size(); ++i) {
      checksums[i] = crc32c(0, reinterpret_cast<const void*>(addresses.data()[i]), sizes.data()[i]);
    }
  }
  return nb::bytes(checksums.data(), checksums.size() * sizeof(std::uint32_t));
}

void copy_memory(const Sizes& targets, const Sizes& sources, const Sizes& sizes) {
  if (targets.size() != sizes.size() || sources.size() != sizes.size()) {
    throw nb::value_error("targets, sources and sizes must have one length");
  }
  nb::gil_scoped_release release;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    std::memcpy(reinterpret_cast<void*>(targets.data()[i]), reinterpret_cast<const void*>(sources.data()[i]),
                sizes.data()[i]);
  }
}

}  // namespace

void register_checkpoint(nb::module_& module) {
  module.def("crc32c", &checksum, "data"_a, "crc"_a = 0,
             nb::sig("def crc32c(data: object, crc: int = 0) -> int"),
             "The CRC32C of a buffer that follows bytes whose checksum is crc. Releases the GIL.");
  module.def("crc32c_blocks", &block_checksums, "data"_a, "block_bytes"_a,
             nb::sig("def crc32c_blocks(data: object, block_bytes: int) -> bytes"),
             "The CRC32C of each block of a buffer, 4 bytes each in the machine's order. Releases the GIL.");
  module.def(
      "crc32c_of_file", &file_checksums, "fd"_a, "starts"_a, "sizes"_a, "into"_a.none() = nb::none(),
      "The CRC32C of ranges of a file, 4 bytes each, and where the last one ends, or the file before it. Of "
      "ranges that ascend, parts are copied too: rows of starts, sizes and addresses. Releases the GIL.");
  module.def("crc32c_of_memory", &memory_checksums, "addresses"_a, "sizes"_a,
             "The CRC32C of ranges of memory, 4 bytes each in the machine's order. Releases the GIL.");
  module.def("copy_memory", &copy_memory, "targets"_a, "sources"_a, "sizes"_a,
             "Copy ranges of memory, which do not overlap, one after another. Releases the GIL.");
}

}  // namespace torchrelay
