#include "torchrelay/session.h"

#include <sys/stat.h>

#include <fstream>
#include <random>

namespace torchrelay {

bool equal(const SessionToken& a, const SessionToken& b) noexcept {
  unsigned char difference = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

std::string network_namespace() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  file >> boot_id;
  struct stat status{};
  if (stat("/proc/self/ns/net", &status) != 0) return "";
  return boot_id + "/" + std::to_string(status.st_ino);
}

std::string random_socket_name() {
  std::random_device random;
  std::string name = "torchrelay-";
  for (int i = 0; i < 4; ++i) name += std::to_string(random());
  return name;
}

Reachable reachable(const std::string& address, const std::string& namespace_id) {
  const auto first = address.find('|'), last = address.rfind('|');
  if (first == std::string::npos) return {address, false};
  if (namespace_id.empty() || address.substr(last + 1) != namespace_id)
    return {address.substr(0, first), false};
  return {address.substr(first + 1, last - first - 1), true};
}

}  // namespace torchrelay
