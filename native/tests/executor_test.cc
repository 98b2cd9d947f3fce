#include "group/executor.h"

#include <atomic>

#include "check.h"

using namespace torchrelay;

namespace {
constexpr std::chrono::seconds kLong{30};
}

TEST(jobs_run_in_order) {
  Executor executor;
  std::vector<int> order;
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int i = 0; i < 100; ++i) tickets.push_back(executor.submit([&order, i](bool) { order.push_back(i); }));
  for (const auto& ticket : tickets) CHECK(ticket->wait(kLong, {}));
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

TEST(a_free_executor_runs_in_the_caller) {
  Executor executor;
  const auto here = std::this_thread::get_id();
  std::thread::id there;
  CHECK(executor.try_run([&] { there = std::this_thread::get_id(); }));
  CHECK(here == there);
  CHECK_THROWS(Code::kMismatch, executor.try_run([] { throw Error(Code::kMismatch, "no"); }));
  CHECK(executor.try_run([] {}));
}

TEST(a_busy_executor_does_not) {
  Executor executor;
  std::atomic<bool> go{false};
  const auto first = executor.submit([&](bool) {
    while (!go) std::this_thread::yield();
  });
  CHECK(!executor.try_run([] {}));
  CHECK(!first->done() && !first->wait(std::chrono::milliseconds(1), {}));
  go = true;
  CHECK(first->wait(kLong, {}));
  CHECK(executor.try_run([] {}));
}

TEST(failures_and_callbacks_reach_the_ticket) {
  Executor executor;
  std::atomic<int> called{0};
  const auto ticket = executor.submit([](bool) { throw Error(Code::kTimeout, "late"); });
  ticket->when_done([&] { ++called; });
  CHECK_THROWS(Code::kTimeout, ticket->wait(kLong, {}));
  CHECK_THROWS(Code::kTimeout, ticket->wait(kLong, {}));
  ticket->when_done([&] { ++called; });
  executor.stop();
  CHECK(called == 2 && ticket->error() != nullptr);
}

TEST(stopping_fails_what_is_queued) {
  Executor executor;
  std::atomic<bool> running{false};
  (void)executor.submit([&](bool) {
    running = true;
    while (!executor.stopping()) std::this_thread::yield();
  });
  const auto queued = executor.submit([](bool) {});
  while (!running) std::this_thread::yield();
  executor.stop();
  CHECK_THROWS(Code::kPeerLost, queued->wait(kLong, {}));
  CHECK_THROWS(Code::kPeerLost, executor.submit([](bool) {}));
}

TEST(a_job_in_the_caller_stops_the_executor_but_adds_no_job) {
  Executor executor;
  CHECK(executor.try_run([&] {
    CHECK_THROWS(Code::kUnavailable, executor.try_run([] {}));
    CHECK_THROWS(Code::kUnavailable, executor.submit([](bool) {}));
    executor.stop();
    CHECK(executor.busy());
  }));
  CHECK(!executor.busy());
  CHECK_THROWS(Code::kPeerLost, executor.try_run([] {}));
}

TEST(a_poll_that_throws_ends_the_wait_only) {
  Executor executor;
  std::atomic<bool> go{false};
  const auto ticket = executor.submit([&](bool) {
    while (!go) std::this_thread::yield();
  });
  CHECK_THROWS(Code::kInterrupted, ticket->wait(kLong, [] { throw Error(Code::kInterrupted, "stop"); }));
  go = true;
  CHECK(ticket->wait(kLong, {}));
}
