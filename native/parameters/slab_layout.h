// The layout of a node's slab: one block of shared memory that all processes of the node map.
//
//   header | users | classes | pools | entries | epochs | class of each entry | keys (dynamic tables) |
//   per channel: changed entries | per class: free slots, rows, accumulators
//
// Keys with rows of equal length form a class; a class has a pool of slots, and a slot is a row's place. A
// slot of a replica also has an accumulator: what was pushed to it and has not been sent to the owner. Pages
// that were never touched take no memory, so the pools are laid out for all keys.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "core/liveness.h"
#include "parameters/element.h"
#include "parameters/robust_lock.h"
#include "parameters/update_rule.h"

namespace torchrelay {

enum class Code;

namespace parameters {

constexpr std::uint32_t kMaxChannels = 64;
constexpr std::uint32_t kMaxWorkers = 256;
constexpr std::uint32_t kMaxUsers = kMaxChannels + kMaxWorkers;  // channels first, then workers
constexpr std::uint32_t kMaxNodes = 1024;
constexpr std::uint32_t kNoSlot = 0xffffffffu;
constexpr std::int64_t kNoKey = INT64_MIN;          // a dynamic table's place without a key
constexpr std::int64_t kTombstone = INT64_MIN + 1;  // of a removed key
constexpr std::int64_t kFinished = INT64_MAX;       // the clock of a worker that has ended

enum class State : std::uint8_t {
  kAbsent,   // no row here; see owner and epoch
  kOwned,    // the master copy
  kReplica,  // a copy; pushes are also summed in the accumulator
};

enum Flag : std::uint8_t {
  kDirty = 1,     // replica: the accumulator holds something
  kShared = 2,    // owner: other nodes hold replicas
  kChanged = 4,   // owner of a shared key: changed since its version was last raised
  kUsed = 8,      // dynamic tables: used since the eviction cursor last passed
  kPinned = 16,   // dynamic tables: a worker of this node has announced to use it
  kLeaving = 32,  // replica: its last update has been sent; it is still read, but takes no more pushes
  kLent = 64,     // replica: it has no optimizer state, and is read until the first push only
};

// Why the table cannot be used any more: the first process that died, or left while others needed it.
struct alignas(8) Loss {  // without the alignment, Clang calls a library for its atomic operations
  enum How : std::uint16_t {
    kNone,
    kUnreachable,  // the node died, or cannot be reached
    kLeft,         // the process left on purpose, or with an error
    kKilled,       // the process died and was not replaced
    kFailed,       // the node's threads cannot go on; see SlabHeader::failure
  };
  How how = kNone;
  std::uint16_t node = 0;
  std::int32_t process = 0;  // 0: not known

  bool operator==(const Loss&) const = default;
};
static_assert(sizeof(Loss) == 8 && std::atomic<Loss>::is_always_lock_free);

// 16 bytes, so that four share a cache line and one never straddles two.
struct Entry {
  std::atomic<std::uint32_t> lock;  // guards all of the entry and its row
  State state;
  std::atomic<std::uint8_t> flags;   // written under the lock; the channel also looks at them without it
  std::atomic<std::uint16_t> owner;  // best known; certain where state is kOwned; written before the epoch
  std::atomic<std::uint32_t> slot;   // written under the lock; read without it to prefetch
  std::uint32_t version;

  bool has(unsigned any) const { return (flags.load(std::memory_order_relaxed) & any) != 0; }
  void raise(unsigned all) { put(flags.load(std::memory_order_relaxed) | all); }
  void lower(unsigned all) { put(flags.load(std::memory_order_relaxed) & ~all); }
  void put(unsigned all) { flags.store(static_cast<std::uint8_t>(all), std::memory_order_relaxed); }
};
static_assert(sizeof(Entry) == 16);

struct ClassInfo {
  std::uint32_t length;        // elements of a value
  std::uint32_t row_length;    // and of its optimizer state
  std::uint64_t stride_bytes;  // from row to row
  std::uint64_t capacity;      // slots
  std::uint64_t free_offset;   // of the stack of freed slots, in the slab
  std::uint64_t rows_offset;
  std::uint64_t accumulators_offset;
};

// Which slots of a class are free.
struct Pool {
  std::atomic<std::uint32_t> lock;
  std::uint32_t never_used;  // slots from here on were never taken
  std::uint64_t free_count;  // on the stack of freed slots
};

// Work that workers ask of a channel by raising `requested`; the channel answers by raising `done`.
struct Flush {
  std::atomic<std::uint64_t> requested;
  std::atomic<std::uint64_t> done;
};

struct ChannelBoard {
  Flush sync;  // all updates of this node have reached their owners, and then all replicas are fresh
};

enum Stat : std::uint32_t {
  kLocalPulls,
  kRemotePulls,
  kLocalPushes,
  kRemotePushes,
  kLocalSets,
  kRemoteSets,
  kSentBytes,
  kReceivedBytes,
  kSentMessages,
  kReceivedMessages,
  kRelocationsIn,
  kReplicasMade,
  kRefreshes,
  kForwards,
  kParked,
  kEvictions,
  kProtocolErrors,
  kDuplicates,
  kRounds,
  kReplicas,      // now
  kRoundNs,       // in rounds
  kRefreshAgeNs,  // summed over refreshes: how long before it the owner last looked
};

// By Stat.
inline constexpr const char* kStatNames[] = {
    "local_pulls", "remote_pulls",   "local_pushes",  "remote_pushes",     "local_sets",      "remote_sets",
    "sent_bytes",  "received_bytes", "sent_messages", "received_messages", "relocations",     "replicas_made",
    "refreshes",   "forwards",       "parked",        "evictions",         "protocol_errors", "duplicates",
    "rounds",      "replicas",       "round_ns",      "refresh_age_ns"};
inline constexpr std::size_t kNumStats = std::size(kStatNames);
static_assert(kNumStats == kRefreshAgeNs + 1);

// The sizes of the slab's parts, and how keys are dealt to nodes, channels and entries.
struct Geometry {
  Dtype dtype;
  std::uint32_t node, num_nodes, num_channels, num_classes;
  std::uint64_t num_entries;
  std::uint64_t num_keys;  // 0: dynamic
  std::uint64_t users_offset, classes_offset, pools_offset, entries_offset, epochs_offset;
  std::uint64_t class_of_offset, keys_offset;   // 0: there is none
  std::uint64_t channel_entries;                // that a channel's indices are below; see index_in_channel
  std::uint64_t changed_offset, changed_bytes;  // of the first channel's set of changed entries; of each set
  std::uint64_t size_bytes;
  UpdateRule rule;  // its learning rate is the first one; the current one is in the header

  bool dynamic() const { return num_keys == 0; }
  bool valid(std::int64_t key) const {
    return dynamic() ? key > kTombstone : static_cast<std::uint64_t>(key) < num_keys;
  }
  std::uint32_t home_of(std::int64_t key) const {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) % num_nodes);
  }
  std::uint32_t channel_of(std::int64_t key) const {
    if (num_channels == 1) return 0;
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(key) / num_nodes % num_channels);
  }
  // The entries of a channel, counted from 0: a dense table's keys are dealt to channels in runs of num_nodes
  // (see channel_of); of a dynamic table, any channel may have any entry.
  std::uint64_t index_in_channel(std::int64_t entry_index) const {
    const std::uint64_t nodes = num_nodes, channels = num_channels;
    const auto key = static_cast<std::uint64_t>(entry_index);
    return dynamic() ? key : key / (nodes * channels) * nodes + key % nodes;
  }
  std::int64_t entry_in_channel(std::uint32_t channel, std::uint64_t index) const {
    const std::uint64_t nodes = num_nodes, channels = num_channels;
    const std::uint64_t key = index / nodes * nodes * channels + channel * nodes + index % nodes;
    return static_cast<std::int64_t>(dynamic() ? index : key);
  }
};

struct SlabHeader : Geometry {
  std::uint64_t magic;
  std::uint32_t version;
  std::atomic<double> learning_rate;
  std::atomic<double> step;               // UpdateRule::step
  std::atomic<std::uint32_t> index_lock;  // dynamic tables: making and removing keys
  std::uint64_t eviction_cursor;          // under index_lock, as are the next two
  std::uint64_t live_entries;
  std::uint32_t first_epoch;  // of a key made at its home: none made there before had a larger one
  std::atomic<Loss> loss;     // the first; it stays, and is passed on to the other nodes
  std::atomic<std::uint32_t> departed_node;  // id + 1 of the first node that ended after the last barrier
  std::atomic<std::uint32_t> stopping;
  std::atomic<std::uint32_t> failed;  // 1: `failure` is being written, 2: it describes why a channel stopped
  char failure[512];
  Code failure_code;
  ProcessId leader;
  std::atomic<std::uint8_t> heard[kMaxNodes];  // 1: the first channel has had a message of that node's
  ChannelBoard boards[kMaxChannels];
  std::atomic<std::uint64_t> stats[kMaxUsers][kNumStats];
};

}  // namespace parameters
}  // namespace torchrelay
