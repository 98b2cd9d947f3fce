// What the parts of one channel share. Used by the channel's thread alone.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "parameters/outbox.h"
#include "parameters/reliable_endpoint.h"
#include "parameters/store.h"

namespace torchrelay::parameters {

enum class Techniques : std::uint32_t { kAll, kReplicationOnly, kRelocationOnly };
inline constexpr const char* kTechniqueNames[] = {"all", "replication_only", "relocation_only"};

struct ChannelOptions {
  Techniques techniques = Techniques::kAll;
  double max_rounds_per_s = 1000;
  double sync_threshold = 0;             // smallest l2 norm of an update worth sending before it must be
  std::uint32_t hysteresis_rounds = 10;  // a key stays at least this long before a replica takes it over
  std::chrono::milliseconds heartbeat_interval{500};
  std::chrono::milliseconds heartbeat_timeout{10000};
};

// A channel's state of an entry, beside the slab.
struct EntryControl {
  std::uint32_t intents = 0;      // live, of this node's workers
  std::uint32_t uses = 0;         // clocks of these intents, without those that loans have served
  std::uint32_t arrived = 0;      // the round in which the key was relocated here
  std::uint32_t list_place = 0;   // in the list of shared keys (owner) or of replicas (replica)
  std::uint32_t outstanding = 0;  // updates and overwrites not acknowledged
  std::uint32_t borrowed = 0;     // owner: uses by `borrower` since others used the key
  std::uint16_t borrower = 0;
  bool wanted = false;       // an acquire is in flight
  bool overwritten = false;  // an overwrite is outstanding: refreshes sent before it are void
};

struct ChannelState {
  using Clock = std::chrono::steady_clock;

  ChannelState(std::shared_ptr<Store> the_store, std::uint32_t id, Network& network,
               const ChannelOptions& the_options);

  std::uint32_t num_nodes() const { return store->header().num_nodes; }
  EntryControl& control(std::int64_t entry_index) {
    return controls[static_cast<std::size_t>(store->header().index_in_channel(entry_index))];
  }
  EntryControl& control(const LockedEntry& entry) { return control(entry.index()); }
  LockedEntry lock(std::int64_t entry_index) { return {*store, entry_index, channel_id}; }
  // The next round visits the entry.
  void mark_changed(std::int64_t entry_index) { changed.mark(store->header().index_in_channel(entry_index)); }
  void count(Stat stat, std::uint64_t amount = 1) { store->count(channel_id, stat, amount); }
  // Pins the entry or not. Its EntryControl is found by its place in the table, so as long as there is
  // anything in it, a dynamic table must not give the place to another key.
  void update_pin(LockedEntry& entry);

  const std::shared_ptr<Store> store;
  const std::uint32_t channel_id;
  const std::uint16_t node;
  const ChannelOptions options;
  ReliableEndpoint endpoint;
  Outbox outbox;
  MarkSet changed;
  std::vector<EntryControl> controls;
  std::vector<bool> departed;  // by node: has left
  std::uint32_t rounds = 0;
};

}  // namespace torchrelay::parameters
