// The owner's side of a channel: decides on relocation and replication, and keeps replicas fresh.
#pragma once

#include <vector>

#include "parameters/channel_state.h"

namespace torchrelay::parameters {

class RequestRouter;

class OwnerSide {
 public:
  OwnerSide(ChannelState& state, RequestRouter& router)
      : state_(state), router_(router), unsent_acks_(state.num_nodes(), 0) {}

  // A node wants the key: decided here if this node owns it, else routed on.
  void handle_acquire(const Record& record);
  // An update or an overwrite of a replica.
  void handle_replica_write(const Record& record, const std::byte* payload);

  // Brings the replicas that `node` holds of these keys up to date; true if it holds any.
  bool catch_up(std::uint16_t node, const std::int64_t* keys, const std::vector<std::uint32_t>& indices);
  // Those that a round refreshes, or all, with their optimizer state.
  void refresh_replicas(LockedEntry& entry, bool all);
  void refresh_all();
  // Acknowledges what has been done since the last time.
  void send_acks();
  // Every changed entry has been looked at.
  void end_refreshes() { last_refreshes_ = ChannelState::Clock::now(); }
  // Makes the only node that still needs the key its owner.
  void consider_upgrade(LockedEntry& entry);
  // Considers again those that had arrived too recently.
  void reconsider_upgrades();

  bool is_busy() const { return !shared_.empty() || !reconsider_.empty(); }
  // Summed over all refreshes: how long before each this node had last looked for changes.
  ChannelState::Clock::duration refresh_age() const { return refresh_age_; }

 private:
  struct Replica {
    std::uint16_t node;
    bool lent = false;              // for one use, without optimizer state
    bool has_stepped = false;       // it has applied its pushes one by one, the owner their sum
    std::uint32_t version = 0;      // that the node has or will have by what was sent
    std::uint32_t row_version = 0;  // of its optimizer state
    std::uint32_t sent_in = 0;      // the round in which its last row was sent

    // The owner's row has changed by what the node wrote.
    void has_written(std::uint32_t before, std::uint32_t after) {
      if (row_version == before) row_version = after;
      version = after;
    }
  };
  struct SharedKey {
    std::int64_t entry_index;
    std::vector<Replica> replicas;
  };

  void decide(LockedEntry& entry, const Record& record);
  void transfer(LockedEntry& entry, std::uint16_t node);
  bool is_worth_moving(LockedEntry& entry, const Record& record);
  void grant(LockedEntry& entry, std::uint16_t node, bool lent);
  void apply_update(LockedEntry& entry, const Record& record, const std::byte* payload);
  void apply_overwrite(LockedEntry& entry, const Record& record, const std::byte* payload);
  // Workers changed the row since the version was last raised, or this channel did just now.
  void raise_version(LockedEntry& entry);
  void raise_version_anew(LockedEntry& entry);
  void refresh(LockedEntry& entry, Replica& replica, unsigned flags);
  void send(std::uint16_t node, const Record& record, const LockedEntry& entry, bool whole_row);
  void send_acks(std::uint16_t node);
  void remove_replica(LockedEntry& entry, std::uint16_t node);
  SharedKey* shared_key(std::int64_t entry_index);
  Replica* replica_of(std::int64_t entry_index, std::uint16_t node);

  ChannelState& state_;
  RequestRouter& router_;
  std::vector<SharedKey> shared_;
  std::vector<std::uint32_t> unsent_acks_;  // by node
  std::vector<std::int64_t> reconsider_;
  ChannelState::Clock::time_point last_refreshes_{};
  ChannelState::Clock::duration refresh_age_{};
};

}  // namespace torchrelay::parameters
