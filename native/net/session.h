// The secret by which the processes of a job recognize each other.
#pragma once

#include <array>

namespace torchrelay {

using SessionToken = std::array<unsigned char, 16>;

// In constant time, so that a token cannot be guessed byte by byte.
bool equal(const SessionToken& a, const SessionToken& b) noexcept;

}  // namespace torchrelay
