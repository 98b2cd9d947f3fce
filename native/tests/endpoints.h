// What the tests of the networks between processes share.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "net/endpoint.h"

namespace torchrelay::testing {

inline Message message(const std::string& text) {
  Message result = Message::allocate(text.size());
  std::memcpy(result.data(), text.data(), text.size());
  return result;
}

inline std::string receive(Endpoint& endpoint, std::chrono::microseconds timeout = std::chrono::seconds(10)) {
  Message result;
  if (!endpoint.receive(result, timeout)) return "(nothing)";
  return {reinterpret_cast<const char*>(result.data()), result.size_bytes()};
}

// A connected socket to the endpoint's port, as a stranger would make it.
inline int stranger_socket(const Endpoint& endpoint) {
  const std::string address = endpoint.address().substr(0, endpoint.address().find('|'));
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&target), sizeof target) == 0);
  return fd;
}

inline void many_senders_reach_one_receiver(Network& net) {
  auto receiver = net.open("r");
  const std::string address = receiver->address();
  std::vector<std::thread> senders;
  for (int s = 0; s < 4; ++s)
    senders.emplace_back([&net, &address, s] {
      auto endpoint = net.open("s");
      endpoint->connect(0, address);
      for (int i = 0; i < 500; ++i) endpoint->send(0, message(std::to_string(s) + ":" + std::to_string(i)));
    });
  int next[4] = {};
  for (int n = 0; n < 2000; ++n) {
    const std::string text = receive(*receiver);
    const int s = text[0] - '0';
    CHECK(s >= 0 && s < 4 && text.substr(2) == std::to_string(next[s]++));
  }
  for (auto& sender : senders) sender.join();
}

}  // namespace torchrelay::testing
