// Sockets that listen, for tests.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "check.h"
#include "group/messenger.h"

namespace torchrelay::testing {

// A port of this host that takes connections.
struct Port {
  Port() : socket(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof at;
    CHECK(bind(socket.get(), reinterpret_cast<sockaddr*>(&at), size) == 0 && listen(socket.get(), 128) == 0);
    getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &size);
    address = {"127.0.0.1", ntohs(at.sin_port)};
  }
  Descriptor socket;
  net::Address address;
};

}  // namespace torchrelay::testing
