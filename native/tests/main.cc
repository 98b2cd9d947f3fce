#include <algorithm>
#include <cstdio>
#include <span>

#include "check.h"

using namespace torchrelay::testing;

namespace {

// Returns whether the test passed.
bool run(const Test& test) {
  try {
    test.body();
    std::printf("ok   %s\n", test.name.data());
    return true;
  } catch (const Failure& failure) {
    std::printf("FAIL %s: %s\n", test.name.data(), failure.what.c_str());
  } catch (const std::exception& error) {
    std::printf("FAIL %s: threw %s\n", test.name.data(), error.what());
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const std::span<char*> files{argv + 1, static_cast<std::size_t>(argc - 1)};
  int passed = 0, failed = 0;
  for (const std::string_view file : files) {
    if (std::ranges::find(tests(), file, &Test::file) != tests().end()) continue;
    std::printf("FAIL %s: there is no test in it\n", file.data());
    ++failed;
  }
  for (const Test& test : tests()) {
    if (!files.empty() && std::ranges::find(files, test.file) == files.end()) continue;
    ++(run(test) ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
