// The test harness of the native core: TEST(name) { CHECK(condition); CHECK_THROWS(code, expression); }
//
// The program runs all tests, or those of the files that its arguments name, without `.cc`.
//
// Our own, because no C++ test library comes from a Python package index and `make test` must
// run these tests on a machine with nothing but Python and a compiler.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace torchrelay::testing {

struct Test {
  std::string_view file, name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Failure {
  std::string what;
};

inline bool add(std::string_view path, std::string_view name, void (*body)()) {
  const std::string_view file = path.substr(path.rfind('/') + 1);
  tests().push_back({file.substr(0, file.rfind('.')), name, body});
  return true;
}

}  // namespace torchrelay::testing

#define TORCHRELAY_TEXT2(x) #x
#define TORCHRELAY_TEXT(x) TORCHRELAY_TEXT2(x)
#define TEST(name)                                                                  \
  static void name();                                                               \
  static const bool name##_added = torchrelay::testing::add(__FILE__, #name, name); \
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
