// The test harness of the native core: TEST(name) { CHECK(condition); CHECK_THROWS(code, expression); }
//
// Our own, because no C++ test library comes from a Python package index and `make test` must
// run these tests on a machine with nothing but Python and a compiler.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "torchrelay/error.h"

namespace torchrelay::testing {

struct Test {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Failure {
  std::string what;
};

inline bool add(const char* name, std::function<void()> body) {
  tests().push_back({name, std::move(body)});
  return true;
}

inline int run_all() {
  int failed = 0;
  for (const Test& test : tests()) {
    try {
      test.body();
      std::printf("ok   %s\n", test.name);
    } catch (const Failure& failure) {
      std::printf("FAIL %s: %s\n", test.name, failure.what.c_str());
      ++failed;
    } catch (const std::exception& error) {
      std::printf("FAIL %s: threw %s\n", test.name, error.what());
      ++failed;
    }
  }
  std::printf("%zu passed, %d failed\n", tests().size() - static_cast<std::size_t>(failed), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace torchrelay::testing

#define TORCHRELAY_TEXT2(x) #x
#define TORCHRELAY_TEXT(x) TORCHRELAY_TEXT2(x)
#define TEST(name)                                                        \
  static void name();                                                     \
  static const bool name##_added = torchrelay::testing::add(#name, name); \
  static void name()
#define CHECK(...)                                                                                  \
  do {                                                                                              \
    if (!(__VA_ARGS__))                                                                             \
      throw torchrelay::testing::Failure{__FILE__ ":" TORCHRELAY_TEXT(__LINE__) ": " #__VA_ARGS__}; \
  } while (false)
#define CHECK_THROWS(expected, ...)                     \
  do {                                                  \
    bool thrown = false;                                \
    try {                                               \
      (void)(__VA_ARGS__);                              \
    } catch (const torchrelay::Error& error) {          \
      thrown = error.code() == (expected);              \
    }                                                   \
    CHECK(thrown && #__VA_ARGS__ " throws " #expected); \
  } while (false)

int main() { return torchrelay::testing::run_all(); }
