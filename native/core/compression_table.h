// What each instruction set's copy of the encodings provides: null where there is none for the dtype.
#pragma once

#include "core/compression.h"

namespace torchrelay {

namespace baseline {
const Codec* codec(Compression compression, Dtype dtype);
}
namespace avx2 {
const Codec* codec(Compression compression, Dtype dtype);
}
namespace avx512 {
const Codec* codec(Compression compression, Dtype dtype);
}

}  // namespace torchrelay
