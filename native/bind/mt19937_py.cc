#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>

#include "core/mt19937.h"
#include "register.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace torchrelay {
namespace {

using Words = nb::ndarray<std::uint32_t, nb::shape<kTwisterWords>, nb::c_contig, nb::device::cpu>;

nb::bytes polynomial(std::uint64_t distance) {
  TwisterPolynomial result;
  {
    nb::gil_scoped_release release;
    result = twister_polynomial(distance);
  }
  return nb::bytes(result.data(), sizeof(result));
}

void jump(Words state, const nb::bytes& coefficients) {
  TwisterPolynomial polynomial;
  if (coefficients.size() != sizeof(polynomial)) throw nb::value_error("a polynomial has 2496 bytes");
  std::memcpy(polynomial.data(), coefficients.data(), sizeof(polynomial));
  nb::gil_scoped_release release;
  twister_jump(std::span<std::uint32_t, kTwisterWords>(state.data(), kTwisterWords), polynomial);
}

}  // namespace

void register_mt19937(nb::module_& module) {
  module.def(
      "twister_polynomial", &polynomial, "distance"_a,
      "x to the distance, modulo the characteristic polynomial of mt19937: 2496 bytes for twister_jump.");
  module.def(
      "twister_jump", &jump, "state"_a, "polynomial"_a,
      "Replaces the 624 words of state by those distance words on; polynomial is that of distance - 1.");
}

}  // namespace torchrelay
