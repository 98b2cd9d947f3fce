#include "switch/datagrams.h"

#include <linux/udp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <tuple>

namespace torchrelay::switchml {
namespace {

constexpr int kBufferBytes = 16 << 20;
constexpr std::size_t kMessages = 16;            // of one system call
constexpr std::size_t kMessageBytes = 64 << 10;  // the most that GRO puts together
constexpr std::size_t kSegments = 60;            // of one message; below the kernel's limit of 64
constexpr std::size_t kLargestPayload = 65'507;  // of one message
using Control = std::array<std::byte, CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(std::uint32_t))>;

sockaddr_in to_sockaddr(const Endpoint& endpoint) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(endpoint.ip);
  address.sin_port = htons(endpoint.port);
  return address;
}

void set_option(int fd, int level, int name, int value) {
  (void)setsockopt(fd, level, name, &value, sizeof value);  // each is an improvement, none a need
}

}  // namespace

void prepare_socket(int fd) {
  set_option(fd, SOL_SOCKET, SO_RCVBUF, kBufferBytes);
  set_option(fd, SOL_SOCKET, SO_RCVBUFFORCE, kBufferBytes);
  set_option(fd, SOL_SOCKET, SO_SNDBUF, kBufferBytes);
  set_option(fd, SOL_SOCKET, SO_SNDBUFFORCE, kBufferBytes);
  set_option(fd, SOL_SOCKET, SO_RXQ_OVFL, 1);
  set_option(fd, IPPROTO_UDP, UDP_GRO, 1);
}

struct Inbox::Batch {
  Batch() : bytes(new std::byte[kMessages * kMessageBytes]) {}

  // The kernel overwrites lengths, so all is set before each call.
  void prepare() {
    for (std::size_t i = 0; i < kMessages; ++i) {
      parts[i] = {bytes.get() + i * kMessageBytes, kMessageBytes};
      msghdr& header = messages[i].msg_hdr;
      header = {};
      header.msg_name = &sources[i];
      header.msg_namelen = sizeof sources[i];
      header.msg_iov = &parts[i];
      header.msg_iovlen = 1;
      header.msg_control = controls[i].data();
      header.msg_controllen = controls[i].size();
    }
  }

  std::unique_ptr<std::byte[]> bytes;
  std::array<mmsghdr, kMessages> messages;
  std::array<iovec, kMessages> parts;
  std::array<sockaddr_in, kMessages> sources;
  alignas(cmsghdr) std::array<Control, kMessages> controls;
};

Inbox::Inbox(int fd) : fd_(fd), batch_(std::make_unique<Batch>()) {}

Inbox::~Inbox() = default;

bool Inbox::receive(const std::function<void(Bytes, const Endpoint&)>& each) {
  batch_->prepare();
  const int got = recvmmsg(fd_, batch_->messages.data(), kMessages, MSG_DONTWAIT, nullptr);
  if (got < 0) {
    refused_ = refused_ || errno == ECONNREFUSED;
    return false;
  }
  for (int i = 0; i < got; ++i) {
    const auto at = static_cast<std::size_t>(i);
    msghdr& header = batch_->messages[at].msg_hdr;
    const std::size_t size = batch_->messages[at].msg_len;
    std::size_t segment = size;
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
        int value = 0;
        std::memcpy(&value, CMSG_DATA(c), sizeof value);
        if (value > 0) segment = static_cast<std::size_t>(value);
      } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SO_RXQ_OVFL) {
        std::memcpy(&lost_, CMSG_DATA(c), sizeof lost_);
      }
    }
    const sockaddr_in& source = batch_->sources[at];
    const Endpoint from{ntohl(source.sin_addr.s_addr), ntohs(source.sin_port)};
    const std::byte* data = batch_->bytes.get() + at * kMessageBytes;
    if (size == 0) each({}, from);
    for (std::size_t begin = 0; begin < size; begin += segment)
      each({data + begin, std::min(segment, size - begin)}, from);
  }
  return got > 0;
}

// The messages of one sendmmsg; entries of one destination and size share a message.
struct Outbox::Messages {
  std::array<mmsghdr, kMessages> headers;
  std::array<sockaddr_in, kMessages> names;
  std::array<std::array<iovec, kSegments>, kMessages> parts;
  alignas(cmsghdr) std::array<Control, kMessages> controls;
  std::size_t count = 0;

  void add(const Entry* entries, std::size_t num_entries, const std::byte* base, bool is_connected) {
    msghdr& header = headers[count].msg_hdr;
    header = {};
    for (std::size_t i = 0; i < num_entries; ++i)
      parts[count][i] = {const_cast<std::byte*>(base + entries[i].offset), entries[i].size};
    header.msg_iov = parts[count].data();
    header.msg_iovlen = num_entries;
    if (!is_connected) {
      names[count] = to_sockaddr(entries[0].to);
      header.msg_name = &names[count];
      header.msg_namelen = sizeof names[count];
    }
    if (num_entries > 1) set_segment(header, static_cast<std::uint16_t>(entries[0].size));
    ++count;
  }

  void set_segment(msghdr& header, std::uint16_t size) {
    header.msg_control = controls[count].data();
    header.msg_controllen = CMSG_SPACE(sizeof size);
    cmsghdr* control = CMSG_FIRSTHDR(&header);
    control->cmsg_level = IPPROTO_UDP;
    control->cmsg_type = UDP_SEGMENT;
    control->cmsg_len = CMSG_LEN(sizeof size);
    std::memcpy(CMSG_DATA(control), &size, sizeof size);
  }
};

std::byte* Outbox::allocate(std::size_t size) {
  const std::size_t offset = bytes_.size();
  bytes_.resize(offset + size);
  entries_.push_back({{}, offset, size});
  return bytes_.data() + offset;
}

void Outbox::send_to(const Endpoint& to) {
  Entry& last = entries_.back();
  if (last.to == Endpoint{}) {
    last.to = to;
  } else {
    entries_.push_back({to, last.offset, last.size});
  }
}

void Outbox::send_run(Bytes packets, std::size_t packet_bytes) {
  std::vector<Entry> entries;
  for (std::size_t offset = 0; offset < packets.size(); offset += packet_bytes)
    entries.push_back({{}, offset, packet_bytes});
  flush(entries, packets.data());
}

void Outbox::flush() {
  if (!is_connected_) {
    std::erase_if(entries_, [](const Entry& entry) { return entry.to == Endpoint{}; });
    std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return std::tie(a.to.ip, a.to.port, a.size) < std::tie(b.to.ip, b.to.port, b.size);
    });
  }
  flush(entries_, bytes_.data());
  entries_.clear();
  bytes_.clear();
}

void Outbox::flush(std::vector<Entry>& entries, const std::byte* base) {
  Messages messages;
  for (std::size_t first = 0; first < entries.size();) {
    const Entry& entry = entries[first];
    const std::size_t most =
        segmentation_
            ? std::clamp<std::size_t>(kLargestPayload / std::max<std::size_t>(entry.size, 1), 1, kSegments)
            : 1;
    std::size_t end = first + 1;
    while (end < entries.size() && end - first < most && entries[end].to == entry.to &&
           entries[end].size == entry.size)
      ++end;
    messages.add(&entry, end - first, base, is_connected_);
    if (messages.count == kMessages) send_messages(messages);
    first = end;
  }
  send_messages(messages);
}

void Outbox::send_messages(Messages& messages) {
  std::size_t sent = 0;
  while (sent < messages.count) {
    const int got = sendmmsg(fd_, &messages.headers[sent], static_cast<unsigned>(messages.count - sent),
                             is_connected_ ? 0 : MSG_DONTWAIT);
    if (got > 0) {
      sent += static_cast<std::size_t>(got);
      continue;
    }
    if (errno == EINTR) continue;
    refused_ = refused_ || errno == ECONNREFUSED;
    // The first of the rest failed. Without segmentation the device may still take its parts one by one.
    msghdr& header = messages.headers[sent].msg_hdr;
    const bool unsegmentable = errno == EIO || errno == EINVAL || errno == EMSGSIZE;
    if (unsegmentable && header.msg_iovlen > 1) segmentation_ = false;
    for (std::size_t i = 0; i < header.msg_iovlen; ++i) {
      msghdr single = header;
      single.msg_iov = &header.msg_iov[i];
      single.msg_iovlen = 1;
      single.msg_control = nullptr;
      single.msg_controllen = 0;
      const bool taken = unsegmentable && sendmsg(fd_, &single, is_connected_ ? 0 : MSG_DONTWAIT) >= 0;
      lost_ += taken ? 0 : 1;
    }
    ++sent;
  }
  messages.count = 0;
}

}  // namespace torchrelay::switchml
