// The aggregation switch as an XDP program: the algorithm of native/switch/state.cc in the kernel.
//
// A packet is summed into its slot, under the slot's lock, when the driver has received it. The last packet
// of a slot leaves with the result through all ports (BPF_F_BROADCAST); the program at each port's exit
// writes the address of the worker behind that port. All other datagrams go up to the host, where the control
// plane reads them.
//
// Compiled by clang -target bpf; no part of it is generated.
// clang-format off: bpf_helpers.h needs linux/bpf.h
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../switch/protocol.h"
#include "../switch/stats.h"
// clang-format on

#define MAX_CALLS 256  // of one address in a second: messages, and data packets of no member
#define SECOND_NS 1000000000ULL
#define RESULT_MARK 0xA6  // the first byte of a result's destination MAC between the two programs

enum verdict { CONSUMED, MULTICAST, UNICAST, DUPLICATE, STALE, REJECTED };

// What this program counts beyond SwitchStat.
enum { kCoalescedPackets = kNumSwitchStats, kNumStats };

struct header {
  __u8 type_and_size;
  __u8 job;
  __be32 tsi;
  __be16 index;
  __s8 exponents[2];
} __attribute__((packed));

struct source {
  __be32 ip;
  __be16 port;  // 0: all
  __u16 zero;
};

struct member {
  __u32 session;  // index into `sessions`
  __u32 rank;
};

struct session {
  __u64 heard_ns[kXdpMaxWorkers];  // the last packet or sign of life
  __u64 stats[kNumSessionStats];
  __u64 worker_received[kXdpMaxWorkers];
  __u64 worker_again[kXdpMaxWorkers];
  __u32 num_workers;
  __u32 num_slots;
  __u32 first_slot;  // into `slots`
  __u32 numel;
  __u32 sequenced;
  __be32 switch_ips[kXdpMaxWorkers];  // by which each worker addresses this host
  __be16 switch_ports[kXdpMaxWorkers];
  __u32 pad;
};

struct worker {  // of a session, by the port behind which it is
  __u8 mac[6];
  __u8 port_mac[6];
  __be32 ip;
  __u32 rank;
  __u32 pad;
};

struct worker_key {
  __u32 session;
  __u32 ifindex;
};

struct slot {
  struct bpf_spin_lock lock;
  __u32 count[2];
  __u32 tsi[2];
  __u32 used[2];
  __s32 exponents[2][2];
  __u32 pad;
  __u64 bitmap[2];
  __be16 ports[2][kXdpMaxWorkers];
  __s32 values[2][kMaxNumel];
};

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __type(key, __u32);
  __type(value, struct slot);
  __uint(max_entries, 1);  // set when loaded, as for `sessions`
} slots SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __type(key, __u32);
  __type(value, struct session);
  __uint(max_entries, 1);
} sessions SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __type(key, struct source);
  __type(value, struct member);
  __uint(max_entries, 65536);
} members SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __type(key, struct worker_key);
  __type(value, struct worker);
  __uint(max_entries, 4096);
} workers SEC(".maps");

struct caller {
  __be32 ip;
  __u32 is_control;
};

struct calls {
  __u64 begin_ns;
  __u64 count;
};

struct {
  __uint(type, BPF_MAP_TYPE_LRU_HASH);
  __type(key, struct caller);
  __type(value, struct calls);
  __uint(max_entries, 8192);
} callers SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_DEVMAP);
  __type(key, __u32);
  __type(value, struct bpf_devmap_val);
  __uint(max_entries, kXdpMaxPorts);
} ports SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __type(key, __u32);
  __type(value, __u64);
  __uint(max_entries, kNumStats);
} stats SEC(".maps");

// What the control plane sets before the program is loaded.
const volatile __u16 udp_port = kUdpPort;
const volatile __u16 udp_port_mask = 0xFFF0;  // at 0xBEE0 the low four bits are free, as in SwitchML

static __always_inline void count(__u32 what) {
  __u64* value = bpf_map_lookup_elem(&stats, &what);
  if (value) ++*value;
}

static __always_inline void count_for(struct session* session, __u32 what) {
  if (what < kNumSessionStats) __sync_fetch_and_add(&session->stats[what], 1);
}

static __always_inline int is_stale(__u32 used, __u32 old, __u32 tsi, int any, int seen, __u32 missing) {
  if (!used) return 0;
  if (!any) return (__s32)(tsi - old) <= 0;
  return tsi != old || (!seen && missing == 0);
}

// The answers' checksum is 0, "none", which UDP over IPv4 allows; the IP header's stays right when only its
// addresses are exchanged.
static __always_inline void turn_around(struct ethhdr* eth, struct iphdr* ip, struct udphdr* udp) {
  __u8 mac[ETH_ALEN];
  __builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
  __builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
  __builtin_memcpy(eth->h_source, mac, ETH_ALEN);
  __be32 address = ip->saddr;
  ip->saddr = ip->daddr;
  ip->daddr = address;
  __be16 port = udp->source;
  udp->source = udp->dest;
  udp->dest = port;
  udp->check = 0;
}

// Applies the packet, and writes the result into it where there is one. `numel` is a constant in each copy.
static __always_inline int aggregate(struct slot* slot, const struct session* session,
                                     const struct member* member, struct header* header, __s32* payload,
                                     __be16 from, const int numel) {
  const __u32 set = (bpf_ntohs(header->index) >> 15) & 1;
  const __u32 tsi = bpf_ntohl(header->tsi);
  const __u64 bit = 1ULL << (member->rank & 63);
  const __u32 num_workers = session->num_workers;
  const __u32 sequenced = session->sequenced;
  int verdict;
  bpf_spin_lock(&slot->lock);
  const __u64 before = slot->bitmap[set];
  const int seen = (before & bit) != 0;
  if (sequenced && is_stale(slot->used[set], slot->tsi[set], tsi, before != 0, seen, slot->count[set])) {
    verdict = STALE;
  } else {
    slot->bitmap[set] = before | bit;
    slot->bitmap[set ^ 1] &= ~bit;
    slot->ports[set][member->rank & 63] = from;
    if (seen) {
      verdict = slot->count[set] == 0 ? UNICAST : DUPLICATE;
    } else {
      const __u32 missing = slot->count[set];
      verdict = missing == 1 || num_workers == 1 ? MULTICAST : CONSUMED;
      slot->count[set] = missing == 0 ? num_workers - 1 : missing - 1;
      if (before == 0) {
        for (int i = 0; i < 2; ++i) slot->exponents[set][i] = header->exponents[i];
        slot->tsi[set] = tsi;
        slot->used[set] = 1;
        for (int i = 0; i < numel; ++i) slot->values[set][i] = bpf_ntohl(payload[i]);
      } else {
        for (int i = 0; i < 2; ++i)
          if (header->exponents[i] > slot->exponents[set][i]) slot->exponents[set][i] = header->exponents[i];
        for (int i = 0; i < numel; ++i) slot->values[set][i] += bpf_ntohl(payload[i]);
      }
    }
    if (verdict == MULTICAST || verdict == UNICAST) {
      header->type_and_size &= 0xF7;  // the unused bits
      header->index &= bpf_htons(0xBFFF);
      for (int i = 0; i < 2; ++i) header->exponents[i] = (__s8)slot->exponents[set][i];
      for (int i = 0; i < numel; ++i) payload[i] = bpf_htonl(slot->values[set][i]);
    }
  }
  bpf_spin_unlock(&slot->lock);
  return verdict;
}

// Passes a datagram to the control plane, but not too many of one address.
static __always_inline int call(__be32 ip, __u32 is_control) {
  const struct caller caller = {ip, is_control};
  const __u64 now = bpf_ktime_get_ns();
  struct calls* calls = bpf_map_lookup_elem(&callers, &caller);
  if (!calls || now - calls->begin_ns > SECOND_NS) {
    const struct calls first = {now, 1};
    bpf_map_update_elem(&callers, &caller, &first, BPF_ANY);
    return XDP_PASS;
  }
  if (__sync_fetch_and_add(&calls->count, 1) < MAX_CALLS) return XDP_PASS;
  count(kControlDropped);
  return XDP_DROP;
}

static __always_inline __u16 folded(__u64 sum) {
  sum = (sum & 0xFFFFFFFF) + (sum >> 32);
  sum = (sum & 0xFFFF) + (sum >> 16);
  sum = (sum & 0xFFFF) + (sum >> 16);
  return (sum & 0xFFFF) + (sum >> 16);
}

// The sum of `bytes` (a multiple of 4), as checksums have it.
static __always_inline __u32 sum_of(void* data, __u32 bytes) { return bpf_csum_diff(0, 0, data, bytes, 0); }

// Whether the checksums are right, as the kernel demands of what it delivers to a socket; a UDP checksum of
// 0 is none. A sender on this machine leaves the sum over the payload to a device, and over veth no device
// computes it: the field then has the pseudo-header's sum. The packet's length has been checked.
static __always_inline int is_intact(struct iphdr* ip, struct udphdr* udp, const int numel) {
  if (folded(sum_of(ip, sizeof *ip)) != 0xFFFF) return 0;
  if (udp->check == 0) return 1;
  __u64 sum = (__u64)sum_of(&ip->saddr, 8) + bpf_htons(IPPROTO_UDP) + udp->len;
  if (udp->check == folded(sum)) return 1;
  __u8* at = (__u8*)udp;
  sum += sum_of(at, 16);
  for (int i = 0; i < numel / 64; ++i) sum += sum_of(at + 16 + 256 * i, 256);
  sum += *(__u16*)(at + 16 + 4 * numel);
  return folded(sum) == 0xFFFF;
}

static __always_inline const struct member* find_member(__be32 ip, __be16 port) {
  struct source source = {ip, port, 0};
  const struct member* member = bpf_map_lookup_elem(&members, &source);
  if (member) return member;
  source.port = 0;
  return bpf_map_lookup_elem(&members, &source);
}

// Also notes that the member is alive.
static __always_inline struct session* find_session(const struct member* member) {
  const __u32 index = member->session;
  struct session* session = bpf_map_lookup_elem(&sessions, &index);
  if (session) session->heard_ns[member->rank & 63] = bpf_ktime_get_ns();
  return session;
}

SEC("xdp")
int torchrelay_switch(struct xdp_md* context) {
  void* data = (void*)(long)context->data;
  void* end = (void*)(long)context->data_end;
  struct ethhdr* eth = data;
  struct iphdr* ip = (void*)(eth + 1);
  struct udphdr* udp = (void*)(ip + 1);
  struct header* header = (void*)(udp + 1);
  __s32* payload = (void*)(header + 1);
  if ((void*)(udp + 1) > end) return XDP_PASS;
  if (eth->h_proto != bpf_htons(ETH_P_IP) || ip->protocol != IPPROTO_UDP) return XDP_PASS;
  if ((ip->frag_off & bpf_htons(0x1FFF)) != 0) return XDP_PASS;  // a later fragment: it has no UDP header
  const struct udphdr* real_udp = (void*)ip + ip->ihl * 4;
  if ((void*)(real_udp + 1) > end || (bpf_ntohs(real_udp->dest) & udp_port_mask) != udp_port) return XDP_PASS;
  if (ip->ihl != 5 || (ip->frag_off & bpf_htons(0x2000)) != 0) {  // with options, or the first fragment
    count(kMalformed);
    return XDP_DROP;
  }

  const __u32 bytes = bpf_ntohs(udp->len) - sizeof *udp;
  if ((void*)(header + 1) > end || bytes < kHeaderBytes) {
    count(kMalformed);
    return XDP_DROP;
  }
  if (header->type_and_size >> 4 == kControlType) {
    const __u8 kind = header->job;  // a control message's second byte
    if (kind == kJoin || kind == kLeave || kind == kAskMissing) {
      count(kControl);
      return call(ip->saddr, 1);
    }
    if (kind != kAlive) {
      count(kMalformed);
      return XDP_DROP;
    }
    count(kControl);
    const struct member* member = find_member(ip->saddr, udp->source);
    if (member) find_session(member);
    return XDP_DROP;
  }
  if (header->type_and_size >> 4 != kDataType) {
    count(kMalformed);
    return XDP_DROP;
  }
  const __u32 code = header->type_and_size & 7;
  const __u32 numel = code == kLargeCode ? 256 : 64;
  const __u32 expected = kHeaderBytes + 4 * numel;
  if (code != kSmallCode && code != kLargeCode) {
    count(kMalformed);
    return XDP_DROP;
  }
  if (bytes != expected) {
    // A run of packets that the sender's segmentation or this host's receive offload has left in one piece.
    if (bytes > expected && bytes % expected == 0) {
      count(kCoalescedPackets);
      return call(ip->saddr, 0);
    }
    count(kMalformed);
    return XDP_DROP;
  }

  int intact = 0;
  if (bpf_ntohs(ip->tot_len) >= sizeof *ip + sizeof *udp + bytes) {
    if (numel == 256)
      intact = (void*)(payload + 256) <= end && is_intact(ip, udp, 256);
    else
      intact = (void*)(payload + 64) <= end && is_intact(ip, udp, 64);
  }
  if (!intact) {
    count(kMalformed);
    return XDP_DROP;
  }

  const struct member* member = find_member(ip->saddr, udp->source);
  if (!member) {
    count(kStrangers);
    return call(ip->saddr, 0);
  }
  const __u32 session_index = member->session;
  struct session* session = find_session(member);
  if (!session) return XDP_DROP;
  session->switch_ips[member->rank & 63] = ip->daddr;
  session->switch_ports[member->rank & 63] = udp->dest;
  count_for(session, kReceived);
  __sync_fetch_and_add(&session->worker_received[member->rank & 63], 1);

  const __u32 slot_index = bpf_ntohs(header->index) & kSlotBits;
  __u32 at = session->first_slot + slot_index;
  struct slot* slot = bpf_map_lookup_elem(&slots, &at);
  if (slot_index >= session->num_slots || numel != session->numel || !slot) {
    count_for(session, kRejected);
    return XDP_DROP;
  }
  int verdict = REJECTED;
  if (numel == 256) {
    if ((void*)(payload + 256) > end) return XDP_DROP;
    verdict = aggregate(slot, session, member, header, payload, udp->source, 256);
  } else {
    if ((void*)(payload + 64) > end) return XDP_DROP;
    verdict = aggregate(slot, session, member, header, payload, udp->source, 64);
  }

  if (verdict == STALE) count_for(session, kStale);
  if (verdict == DUPLICATE) count_for(session, kDuplicates);
  if (verdict == DUPLICATE || verdict == UNICAST)
    __sync_fetch_and_add(&session->worker_again[member->rank & 63], 1);
  if (verdict == UNICAST) {
    count_for(session, kAnsweredAgain);
    count_for(session, kSent);
    turn_around(eth, ip, udp);
    return bpf_redirect(context->ingress_ifindex, 0);  // not XDP_TX, which veth has only between two programs
  }
  if (verdict != MULTICAST) return XDP_DROP;
  count_for(session, kCompleted);
  turn_around(eth, ip, udp);
  eth->h_dest[0] = RESULT_MARK;
  __builtin_memcpy(eth->h_dest + 1, &session_index, sizeof session_index);
  return bpf_redirect_map(&ports, 0, BPF_F_BROADCAST);
}

// Replaces one address of an IP header, and corrects its checksum (RFC 1624).
static __always_inline void replace_address(struct iphdr* ip, __be32* address, __be32 by) {
  const __be32 old = *address;
  __u32 sum = (__u16)~ip->check + (__u16) ~(old & 0xFFFF) + (__u16) ~(old >> 16) + (by & 0xFFFF) + (by >> 16);
  sum = (sum & 0xFFFF) + (sum >> 16);
  sum = (sum & 0xFFFF) + (sum >> 16);
  ip->check = (__u16)~sum;
  *address = by;
}

// At the exit of each port: the copy of a result goes to the worker of its session behind this port, if there
// is one.
SEC("xdp/devmap")
int torchrelay_port(struct xdp_md* context) {
  void* data = (void*)(long)context->data;
  void* end = (void*)(long)context->data_end;
  struct ethhdr* eth = data;
  struct iphdr* ip = (void*)(eth + 1);
  struct udphdr* udp = (void*)(ip + 1);
  struct header* header = (void*)(udp + 1);
  if ((void*)(header + 1) > end || eth->h_dest[0] != RESULT_MARK) return XDP_PASS;
  struct worker_key key = {0, context->egress_ifindex};
  __builtin_memcpy(&key.session, eth->h_dest + 1, sizeof key.session);
  const struct worker* worker = bpf_map_lookup_elem(&workers, &key);
  struct session* session = bpf_map_lookup_elem(&sessions, &key.session);
  if (!worker || !session) return XDP_DROP;
  const __u32 index = bpf_ntohs(header->index);
  __u32 at = session->first_slot + (index & kSlotBits);
  const struct slot* slot = bpf_map_lookup_elem(&slots, &at);
  if (!slot) return XDP_DROP;
  __builtin_memcpy(eth->h_dest, worker->mac, ETH_ALEN);
  __builtin_memcpy(eth->h_source, worker->port_mac, ETH_ALEN);
  replace_address(ip, &ip->daddr, worker->ip);
  replace_address(ip, &ip->saddr, session->switch_ips[worker->rank & 63]);
  udp->source = session->switch_ports[worker->rank & 63];
  udp->dest = slot->ports[(index >> 15) & 1][worker->rank & 63];
  count_for(session, kSent);
  return XDP_PASS;
}

const char kLicense[] SEC("license") = "Dual BSD/GPL";
