// The test harness of the native core: TEST(name) { CHECK(condition); CHECK_THROWS(code, expression); }
//
// A test program runs all of its tests, or those whose names its arguments give.
//
// Our own, because no C++ test library comes from a Python package index and `make test` must
// run these tests on a machine with nothing but Python and a compiler.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

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

// Returns whether the test passed.
inline bool run(const Test& test) {
  try {
    test.body();
    std::printf("ok   %s\n", test.name);
    return true;
  } catch (const Failure& failure) {
    std::printf("FAIL %s: %s\n", test.name, failure.what.c_str());
  } catch (const std::exception& error) {
    std::printf("FAIL %s: threw %s\n", test.name, error.what());
  }
  return false;
}

// Returns the program's exit status.
inline int run_all(std::span<char*> names) {
  int passed = 0, failed = 0;
  for (const std::string name : names) {
    if (std::ranges::find(tests(), name, [](const Test& test) { return test.name; }) != tests().end())
      continue;
    std::printf("FAIL %s: there is no test of this name\n", name.c_str());
    ++failed;
  }
  for (const Test& test : tests()) {
    if (!names.empty() && std::ranges::find(names, std::string(test.name)) == names.end()) continue;
    ++(run(test) ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
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

int main(int argc, char** argv) {
  return torchrelay::testing::run_all({argv + 1, static_cast<std::size_t>(argc - 1)});
}
