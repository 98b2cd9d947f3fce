// One channel of a node: the thread that answers other nodes about its share of the keys, and that brings
// keys here, or copies of them, because workers of this node announced to need them.
//
// Only a key's channel changes where it is; workers only read and write rows that are here. Channels of equal
// id on all nodes talk to each other, in order and exactly once (reliable_endpoint.h). What the protocol
// rests on:
//
//  * The owner has the master copy and decides. What is meant for the owner is routed by (owner, epoch):
//    the epoch rises with each relocation, and the larger one is right. A node that is told to own a key
//    it does not have yet parks what it is asked: the key is on its way to it.
//  * A key with replicas only moves to the one node that has the last. What a replica sends goes to the owner
//    that granted it, and is not sent on: if that is the owner no longer, the replica has become it, and its
//    row has all that it sent.
//  * A replica has a row and an accumulator. At most one update of it is under way; its copy is kept until
//    the owner has acknowledged it, so that a refresh that was sent before the owner got it can be completed.
//  * A replica is given up by an update marked as its last. Until it is acknowledged the row stays and is
//    read: what a worker wrote, it reads. Pushes go to the owner from then on; a set waits for its end, so as
//    not to overtake what was pushed before.
//  * No worker sees a replica older than what it has already been told. An answer to a node that holds a
//    replica of the key goes through that node's channel, behind a refresh. Of a replica that is being given
//    up the owner may know no longer: an answer waits, at the worker, until it is gone.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "torchrelay/parameters/intents.h"
#include "torchrelay/parameters/reliable_endpoint.h"
#include "torchrelay/parameters/store.h"
#include "torchrelay/parameters/worker.h"

namespace torchrelay::parameters {

enum class Techniques : std::uint32_t { kAll, kReplicationOnly, kRelocationOnly };

struct ChannelOptions {
  Techniques techniques = Techniques::kAll;
  double max_rounds_per_s = 1000;
  double sync_threshold = 0;             // smallest l2 norm of an update worth sending before it must be
  std::uint32_t hysteresis_rounds = 10;  // a key stays at least this long before a replica takes it over
  std::chrono::milliseconds heartbeat_interval{500};
  std::chrono::milliseconds heartbeat_timeout{10000};
};

class Channel {
 public:
  Channel(std::shared_ptr<Store> store, std::uint32_t channel_id, Network& network,
          const ChannelOptions& options);

  std::string address() const { return endpoint_.address(); }
  void connect(const ChannelAddresses& addresses);

  // Serves until the slab says to stop; then tells the others. Never throws: what goes wrong is written into
  // the slab, for the workers to raise.
  void run() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  // The announcements of one worker; a larger incarnation is another process under the same id.
  struct Announcer {
    std::uint32_t incarnation = 0;
    WorkerIntents intents;
  };
  // What this channel knows of an entry beside what the slab holds.
  struct Control {
    std::uint32_t intents = 0;      // live, of this node's workers
    std::uint32_t arrived = 0;      // the round in which the key was relocated here
    std::uint32_t list_place = 0;   // in shared_ (owner) or replicas_ (replica)
    std::uint32_t outstanding = 0;  // updates and overwrites not acknowledged
    bool wanted = false;            // an acquire is under way
    bool overwritten = false;       // an overwrite is outstanding: refreshes sent before it are void
  };
  struct Replica {
    std::uint32_t node;
    std::uint32_t version;  // that the node has or will have by what was sent
  };
  struct SharedKey {
    std::int64_t entry_index;
    std::vector<Replica> replicas;
  };
  struct Reply {
    std::uint32_t count;
    Message message;
  };
  struct Outbox {
    std::vector<std::byte> bytes;
    std::uint32_t count = 0;
  };
  // Part of a request, of one key.
  struct Asked {
    RequestHead head;
    std::int64_t key;
    std::uint32_t epoch;
    std::uint32_t position;
    const std::byte* value;  // null: a read
  };
  struct Parked {
    Message message;  // keeps what `asked` points to
    Asked asked;
    Record record;  // an acquire; kind 0: it is `asked`
  };
  // Who is told once all replicas of our keys are fresh: another node's channel, or (its id: ours) a
  // worker.
  struct FlushWaiter {
    std::uint32_t endpoint;
    std::uint64_t round_id;
  };
  struct FlushItem {
    std::int64_t entry_index;
    bool sent;
  };

  // channel.cc: the loop
  void loop();
  void handle(const Header& header, const Message& message);
  void take_intent(const Header& header, const Message& message);
  void handle_bundle(const Header& header, const Message& message);
  void handle_record(const Record& record, const std::byte* payload);
  void take_location(const Record& record);
  void take_eviction(const Record& record);
  void begin_anew(std::int64_t entry_index);
  void take_recall(const Record& record);
  void tell_evicted(std::int64_t key, std::uint32_t epoch);
  void make_room();
  void evict_moved(std::uint64_t places);
  void take_slot(std::int64_t entry_index);
  void round();
  void round_intents();
  void step_intents(WorkerIntents& intents, std::int64_t clock);
  void beat();
  void look_for_dead(std::uint32_t node);
  void lose(std::uint32_t node);
  void report_loss();
  void take_loss(const Message& message);
  void goodbye();
  void take_goodbye(std::uint32_t sender);
  void put(std::uint32_t node, Record record, const void* payload, std::size_t payload_bytes);
  void send_outbox(std::uint32_t node);
  void send_outboxes();
  void publish_stats();
  void sync_changed();
  void mark_changed(std::int64_t entry_index);
  Control& control(std::int64_t entry_index) {
    return controls_[static_cast<std::size_t>(store_->index_in_channel(entry_index))];
  }

  // channel_flush.cc: wait_sync
  void handle_flush(const Header& header, const Message& message);
  void serve_flush_updates();
  void serve_flush_refreshes();
  void serve_fences();
  std::uint32_t tell_all(Kind kind, std::uint64_t round_id);
  void tell(std::uint32_t endpoint, Kind kind, std::uint64_t round_id);

  // channel_owner.cc: deciding where a key lives
  void take_acquire(const Record& record);
  bool take_acquire_at(std::int64_t entry_index, const Record& record);
  void take_from_replica(const Record& record, const std::byte* payload);
  void owner_acquire(std::int64_t entry_index, const Record& record);
  void owner_update(std::int64_t entry_index, const Record& record, const std::byte* payload);
  void owner_overwrite(std::int64_t entry_index, const Record& record, const std::byte* payload);
  void transfer(std::int64_t entry_index, std::uint32_t node);
  void grant(std::int64_t entry_index, std::uint32_t node);
  void raise_version(std::int64_t entry_index);
  void raise_version_anew(std::int64_t entry_index);
  void refresh(std::int64_t entry_index, Replica& replica, std::uint8_t flags);
  void refresh_replicas(std::int64_t entry_index);
  void refresh_all();
  void remove_replica(std::int64_t entry_index, std::uint32_t node);
  void consider_upgrade(std::int64_t entry_index);
  SharedKey* shared(std::int64_t entry_index);
  Replica* replica_of(std::int64_t entry_index, std::uint32_t node);

  // channel_replica.cc: keys that come here
  bool begin_intent(std::int64_t key);
  bool begin_intent_at(std::int64_t entry_index, std::int64_t key);
  void end_intent(std::int64_t key);
  void acquire(std::int64_t entry_index);
  void pin(std::int64_t entry_index);
  void take_grant(const Record& record, const std::byte* payload);
  void take_transfer(const Record& record, const std::byte* payload);
  void take_refresh(const Record& record, const std::byte* payload);
  void take_ack(const Record& record);
  void settle_ack(std::int64_t entry_index, std::uint32_t version);
  void send_update(std::int64_t entry_index, bool last);
  void sync_replica(std::int64_t entry_index, bool force);
  bool is_worth_sending(std::int64_t entry_index) const;
  void add_replica(std::int64_t entry_index);
  void forget_replica(std::int64_t entry_index);

  // Where a key's owner is, as far as this node knows.
  struct OwnerLookup {
    std::int64_t entry_index;  // -1: of this key it knows nothing, or has forgotten it
    std::uint32_t owner;
    std::uint32_t epoch;
  };
  OwnerLookup look_up_owner(std::int64_t key) const;
  // Must what was routed here by knowledge of this epoch wait, because the key is on its way here?
  bool must_wait(const OwnerLookup& known, std::int64_t key, std::uint32_t epoch) const;

  // channel_requests.cc: serving, forwarding and parking
  void handle_request(const Header& header, const Message& message);
  void handle_relay(const Header& header, const Message& message);
  bool catch_up(std::uint32_t node, const std::int64_t* keys, const std::vector<std::uint32_t>& indices);
  void place_missed(const RequestHead& head, Asked asked, const Message& message,
                    std::vector<std::vector<Asked>>& by_node);
  void overwrite_replica(std::int64_t entry_index, const Asked& asked);
  void answer_overwrites(std::int64_t entry_index);
  void forward_requests(const RequestHead& head, const std::vector<std::vector<Asked>>& by_node);
  void route(Record record);
  void park(Parked parked);
  void unpark(std::int64_t key);
  Message request_of(const RequestHead& head, const Asked* asked, std::size_t count);
  Message reply_of(const Asked& asked);
  void answer_worker(std::uint32_t worker, std::uint32_t count, Message reply);
  void answer_met_workers();
  void send_reply(std::uint32_t requester, std::uint32_t count, Message reply, bool through_channel);

  std::shared_ptr<Store> store_;
  std::uint32_t channel_id_;
  std::uint32_t node_;
  ChannelOptions options_;
  ReliableEndpoint endpoint_;
  MarkSet changed_;
  std::vector<Control> controls_;
  std::vector<SharedKey> shared_;
  std::vector<std::int64_t> replicas_;
  std::vector<std::int64_t> reconsider_;
  std::unordered_map<std::int64_t, std::vector<std::byte>> in_flight_;  // the update under way, by entry
  std::unordered_map<std::int64_t, std::vector<Parked>> parked_;        // by key
  std::unordered_map<std::int64_t, std::vector<Asked>> overwrites_;     // to be answered, by entry
  std::unordered_map<std::uint32_t, Announcer> announcers_;             // by user id
  std::uint64_t eviction_cursor_ = 0, recall_cursor_ = 0;
  bool making_room_ = false;
  std::vector<std::int64_t> without_room_;  // keys of this home that something is parked for
  std::unordered_map<std::uint32_t, std::vector<Reply>> unmet_;  // by worker: to be sent once we meet it
  std::vector<Outbox> outboxes_;                                 // by node
  std::vector<Clock::time_point> last_heard_;                    // of a node's channels, by node
  std::vector<bool> gone_;                                       // by node: said goodbye
  std::vector<bool> refused_;  // by node: its host refused a connection at the last beat
  bool has_reported_loss_ = false;
  Clock::time_point next_round_, last_round_, next_beat_, next_look_;
  Clock::time_point last_refresh_all_;
  Clock::duration in_rounds_{}, refresh_age_{};  // sums
  Clock::duration round_interval_{};
  bool waiting_intents_ = false;
  std::uint64_t reported_errors_ = 0;  // of the endpoint
  std::uint32_t rounds_ = 0;
  std::vector<FlushItem> flush_items_;
  std::uint64_t flush_updates_target_ = 0;
  std::uint64_t flush_refreshes_target_ = 0;  // of our workers; 0: none asks
  std::uint64_t flush_id_ = 0;
  std::uint32_t flush_acks_missing_ = 0;
  bool own_fence_passed_ = false;
  std::vector<FlushWaiter> waiting_for_next_fence_, waiting_for_fence_;
  std::uint32_t fences_missing_ = 0;
  std::uint64_t fence_id_ = 0;
};

}  // namespace torchrelay::parameters
