#include "group/call_rows.h"

#include <array>
#include <cstring>

#include "check.h"

namespace torchrelay {
namespace {

// What an exchange between ranks does.
void exchange(std::array<CallRows, 3>& ranks) {
  for (CallRows& to : ranks)
    for (std::size_t from = 0; from < ranks.size(); ++from)
      std::memcpy(to.received() + from * to.row_bytes(), ranks[from].sent(), to.row_bytes());
}

TEST(rows_that_differ_are_found_on_every_rank) {
  std::array<CallRows, 3> ranks{CallRows(3, 32), CallRows(3, 32), CallRows(3, 32)};
  const std::array<std::uint64_t, 3> digests{7, 7, 8};
  for (std::size_t rank = 0; rank < 3; ++rank) ranks[rank].write(digests[rank], {});
  exchange(ranks);
  CHECK(ranks[0].first_difference() == 2);
  CHECK(ranks[1].first_difference() == 2);
  CHECK(ranks[2].first_difference() == 0);
  CHECK(ranks[1].digest(2) == 8);
  ranks[2].write(7, {});
  exchange(ranks);
  for (const CallRows& rows : ranks) CHECK(rows.first_difference() == -1);
}

TEST(payloads_are_reduced_in_the_order_of_ranks) {
  std::array<CallRows, 3> ranks{CallRows(3, 12), CallRows(3, 12), CallRows(3, 12)};
  CHECK(ranks[0].payload_bytes() == 16);
  for (std::size_t rank = 0; rank < 3; ++rank) {
    const std::array<float, 2> values{
        1e8F * static_cast<float>(rank == 0) - 1e8F * static_cast<float>(rank == 1),
        static_cast<float>(rank)};
    ranks[rank].write(1, std::as_bytes(std::span(values)));
  }
  exchange(ranks);
  std::array<float, 2> result{};
  ranks[2].reduce(Dtype::kFloat32, Op::kSum, reinterpret_cast<std::byte*>(result.data()), 2);
  CHECK(result[0] == 0.0F && result[1] == 3.0F);
}

TEST(payloads_longer_than_a_row_are_refused) {
  CallRows rows(2, 16);
  const std::array<std::byte, 17> payload{};
  std::array<double, 3> out{};
  CHECK_THROWS(Code::kArgument, rows.write(1, payload));
  CHECK_THROWS(Code::kArgument,
               rows.reduce(Dtype::kFloat64, Op::kSum, reinterpret_cast<std::byte*>(out.data()), 3));
  CHECK_THROWS(Code::kArgument, CallRows(0, 16));
}

}  // namespace
}  // namespace torchrelay
