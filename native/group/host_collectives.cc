#include "group/host_collectives.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"
#include "group/shares.h"

namespace torchrelay {
namespace {

// Tags; those of users are not negative.
constexpr std::int32_t kRecords = -1, kParts = -2, kSums = -3;
// Whoever waits for the cause of a delay names it; those behind it wait this much longer, if some rank waits
// for others of its host.
constexpr std::chrono::nanoseconds kGrace = std::chrono::seconds(2);
constexpr std::uint64_t kAnySize = ~std::uint64_t{0};  // each pair of ranks has its own
constexpr std::uint8_t kBytes = 255;                   // of no type

using Sizes = std::vector<std::uint64_t>;
using Transfers = std::vector<std::shared_ptr<Transfer>>;

// A rank's call, as all ranks get it.
struct Record {
  Call call;
  std::uint64_t mine = 0;   // bytes of this rank's own block, where ranks may differ
  std::uint64_t sizes = 0;  // a hash of the bytes of all ranks' blocks, as far as this rank knows them
};
static_assert(sizeof(Record) == 32);

std::uint64_t hash_of(const Sizes& sizes) {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const std::uint64_t size : sizes)
    for (unsigned shift = 0; shift < 64; shift += 8) hash = (hash ^ ((size >> shift) & 0xff)) * 0x100000001b3;
  return hash;
}

Sizes sizes_of(const std::vector<Block>& blocks) {
  Sizes out;
  for (const Block& block : blocks) out.push_back(block.size_bytes);
  return out;
}

// An average is divided at the end. float16, whose sums would overflow, is averaged in each step.
Op partial(Op op, Dtype dtype) { return op == Op::kAverage && dtype != Dtype::kFloat16 ? Op::kSum : op; }

// The part of a block from `offset` on, at most `limit` long.
Block part(Block block, std::size_t offset, std::size_t limit) {
  if (offset >= block.size_bytes) return {};
  return {block.data + offset, std::min(limit, block.size_bytes - offset)};
}

// One collective in progress. A transfer may use its memory until the group is broken.
class Round {
 public:
  Round(HostGroup& group_, const Operation& operation_)
      : group(group_),
        local(group_.local()),
        at(group_.hosts()),
        operation(operation_),
        host(at.host_of(at.rank)),
        mine(static_cast<std::size_t>(local.rank())),
        first_(operation_),
        grace_(std::ranges::any_of(at.ranks, [](const auto& ranks) { return ranks.size() > 1; })
                   ? kGrace
                   : std::chrono::nanoseconds(0)),
        deadline_(operation_.start + operation_.timeout + grace_) {
    operation.timeout += 2 * grace_;
  }

  HostGroup& group;
  SharedGroup& local;
  const Hosts& at;
  Operation operation;     // in shared memory
  const std::size_t host;  // of this rank
  const std::size_t mine;  // this rank's index in its host

  std::size_t size() const { return at.names.size(); }
  const std::vector<int>& here() const { return at.ranks[host]; }
  bool is_here(int rank) const { return at.host_of(rank) == host; }
  int index_here(int rank) const {
    return static_cast<int>(std::ranges::find(here(), rank) - here().begin());
  }
  bool has_neighbours() const { return local.size() > 1; }

  // The rank of another host that exchanges with the rank at `index` of its own.
  int counterpart(std::size_t other, std::size_t index) const {
    return at.ranks[other][index % at.ranks[other].size()];
  }

  template <class Function>
  void for_other_hosts(Function function) const {
    for (std::size_t other = 0; other < at.ranks.size(); ++other)
      if (other != host) function(other);
  }

  // Adds what a host's ranks reduced with `op`: an average as often as their share of all ranks asks for.
  void add_source(std::vector<const std::byte*>& sources, std::size_t from, Op op,
                  const std::byte* source) const {
    std::size_t common = 0;
    for (const auto& ranks : at.ranks) common = std::gcd(common, ranks.size());
    sources.insert(sources.end(), op == Op::kAverage ? at.ranks[from].size() / common : 1, source);
  }

  // The blocks of this host's ranks.
  template <class Value>
  std::vector<Value> here(const std::vector<Value>& blocks) const {
    std::vector<Value> out;
    if (!blocks.empty())
      for (const int rank : here()) out.push_back(blocks[static_cast<std::size_t>(rank)]);
    return out;
  }

  std::byte* scratch(std::size_t size_bytes) {
    scratch_.push_back(std::make_unique_for_overwrite<std::byte[]>(size_bytes));
    return scratch_.back().get();
  }

  // Empty blocks are not sent.
  void send(Transfers& transfers, int to, std::int64_t tag, Block block) {
    if (block.size_bytes != 0)
      transfers.push_back(group.messenger().send(block, to, tag, 0, Messenger::kNoTimeout));
  }

  void receive(Transfers& transfers, int source, std::int64_t tag, Block block) {
    if (block.size_bytes != 0)
      transfers.push_back(group.messenger().receive(block, source, tag, 0, Messenger::kNoTimeout));
  }

  void finish(Transfers& transfers) {
    for (const auto& transfer : transfers)
      group.messenger().complete(transfer, operation.name, deadline_, [this] {
        if (operation.poll) operation.poll();
        local.check(operation);
      });
    transfers.clear();
  }

  std::chrono::nanoseconds left() const {
    return std::max<std::chrono::nanoseconds>(deadline_ - grace_ - Messenger::Clock::now(), {});
  }

  void broadcast_here(Block block, int root) {
    if (!has_neighbours()) return;
    group.count_shared(block.size_bytes);
    torchrelay::broadcast(local, operation, block, kBytes, index_here(root));
  }

  // All ranks' `row`, in their order; its size is equal on all.
  std::vector<std::byte> share(const std::vector<std::byte>& row) {
    const std::size_t width = row.size();
    std::vector<std::byte> by_host(size() * width);
    std::vector<Block> blocks;  // of each host
    for (std::size_t at_byte = 0; const auto& ranks : at.ranks) {
      blocks.push_back({by_host.data() + at_byte, ranks.size() * width});
      at_byte += ranks.size() * width;
    }
    std::vector<Block> rows;
    for (std::size_t i = 0; i < here().size(); ++i) rows.push_back({blocks[host].data + i * width, width});
    torchrelay::all_gather(local, first_, {const_cast<std::byte*>(row.data()), width}, rows, kBytes);
    if (mine == 0) {
      Transfers moving;
      for_other_hosts([&](std::size_t other) {
        send(moving, at.ranks[other][0], kRecords, blocks[host]);
        receive(moving, at.ranks[other][0], kRecords, blocks[other]);
      });
      keep_ = std::move(by_host);  // until they have ended
      finish(moving);
      by_host = std::move(keep_);
    }
    broadcast_here({by_host.data(), by_host.size()}, here()[0]);
    std::vector<std::byte> out(by_host.size());
    for (std::size_t other = 0; other < at.ranks.size(); ++other)
      for (std::size_t i = 0; i < at.ranks[other].size(); ++i)
        std::memcpy(out.data() + static_cast<std::size_t>(at.ranks[other][i]) * width,
                    blocks[other].data + i * width, width);
    return out;
  }

  // Compares the ranks' calls. Returns all ranks' payloads, in their order, if they fit in the records:
  // `largest_bytes` is the size of the largest. Else returns nothing.
  std::vector<const std::byte*> agree(const Record& record, Block payload = {},
                                      std::size_t largest_bytes = kAnySize) {
    const std::size_t limit = at.inline_bytes, width = sizeof record + limit;
    const bool fits = std::max(payload.size_bytes, largest_bytes) <= limit;
    std::vector<std::byte> row(width);
    std::memcpy(row.data(), &record, sizeof record);
    if (fits && payload.size_bytes != 0)
      std::memcpy(row.data() + sizeof record, payload.data, payload.size_bytes);
    table_ = share(row);
    records.resize(size());
    std::vector<const std::byte*> payloads;
    for (std::size_t rank = 0; rank < size(); ++rank) {
      std::memcpy(&records[rank], table_.data() + rank * width, sizeof record);
      if (fits) payloads.push_back(table_.data() + rank * width + sizeof record);
    }
    compare();
    return payloads;
  }

  std::vector<Record> records;  // of all ranks, once they have agreed

  [[noreturn]] void differ(const std::string& how) const {
    throw Error(Code::kMismatch, "rank " + std::to_string(group.name()) + ", " + operation.name + ": " + how);
  }

 private:
  void compare() const {
    std::vector<Call> calls;
    Sizes blocks;
    for (const Record& each : records) {
      calls.push_back(each.call);
      blocks.push_back(each.mine);
    }
    if (std::ranges::any_of(calls, [&](const Call& each) { return each != calls[0]; }))
      differ(describe_difference(calls, at.names));
    const Call& call = calls[0];
    const bool all_know = call.kind == Kind::kAllGather;
    if (!all_know && call.kind != Kind::kGather && call.kind != Kind::kScatter) return;
    const auto knows = [&](std::size_t rank) { return all_know || call.root == static_cast<int>(rank); };
    const std::uint64_t expected = hash_of(blocks);
    for (std::size_t rank = 0; rank < size(); ++rank) {
      if (!knows(rank) || records[rank].sizes == expected) continue;
      std::string list;
      for (std::size_t r = 0; r < size(); ++r)
        list += (r == 0 ? "rank " : ", rank ") + std::to_string(at.names[r]) +
                (call.kind == Kind::kScatter ? " expects " : " sends ") + std::to_string(blocks[r]) +
                " bytes";
      differ("the ranks do not agree on sizes: " + list + ", but " +
             (all_know ? "some ranks' outputs"
                       : "the tensors of the root, rank " +
                             std::to_string(at.names[static_cast<std::size_t>(call.root)]) + ",") +
             " have other sizes; check the shapes on all of them");
    }
  }

  const Operation first_;  // whoever is missing here is named by its host
  const std::chrono::nanoseconds grace_;
  const Messenger::Clock::time_point deadline_;
  std::vector<std::unique_ptr<std::byte[]>> scratch_;
  std::vector<std::byte> keep_, table_;
};

// What the other ranks get to know of what ended a collective on this one alone.
Error failure(const HostGroup& group, const Operation& operation, const std::string& why) {
  return {Code::kPeerLost,
          "rank " + std::to_string(group.name()) + " " + why + " in " + operation.name,
          {group.name()}};
}

// Runs a collective. What ends it early breaks the group on all ranks, unless they differ.
template <class Body>
void perform(HostGroup& group, const Operation& operation, Body body) {
  group.require_whole();
  Round round(group, operation);
  try {
    body(round);
  } catch (const Error& error) {
    if (error.code() == Code::kMismatch || error.code() == Code::kArgument) throw;
    const bool is_failure = error.code() == Code::kTimeout || error.code() == Code::kPeerLost;
    const bool is_lack = error.code() == Code::kUnavailable;
    const std::string why = is_lack ? std::string("failed (") + error.what() + ")" : "was interrupted";
    const Error first = group.messenger().fail(is_failure ? error : failure(group, operation, why));
    if (!is_failure) throw;
    const std::string here = "rank " + std::to_string(group.name()) + ", " + operation.name;
    if (std::string(first.what()).starts_with(here)) throw first;
    throw Error(first.code(), here + ": " + first.what(), first.ranks());
  } catch (const std::bad_alloc&) {
    group.messenger().fail(failure(group, operation, "has no memory left"));
    throw;
  } catch (...) {
    group.messenger().fail(failure(group, operation, "was interrupted"));
    throw;
  }
}

// What a step of a reduction sends and receives: elements as they are, or encoded where there is a codec.
class Wire {
 public:
  struct Incoming {
    Transfers transfers;
    std::vector<std::pair<Block, Block>> encoded;  // and where its elements go
  };

  // Of at most `size_bytes` of elements at a time.
  Wire(Round& round, const Codec* codec, Dtype dtype, std::size_t size_bytes)
      : round_(&round),
        codec_(codec),
        item_(torchrelay::size_bytes(dtype)),
        piece_bytes_(codec == nullptr ? 0 : codec->size_bytes(size_bytes / item_)) {}

  // What was encoded before is not used any more.
  void begin() { used_ = 0; }

  // What to send for `elements`; `lost` as for Codec.
  Block encoded(Block elements, float* lost = nullptr) {
    if (codec_ == nullptr || elements.size_bytes == 0) return elements;
    const Block out = reserve(elements);
    codec_->encode(elements.data, elements.size_bytes / item_, out.data, lost);
    return out;
  }

  void decode(Block encoded, Block elements) const {
    if (encoded.data != elements.data)
      codec_->decode(encoded.data, elements.size_bytes / item_, elements.data);
  }

  void receive(Incoming& incoming, int source, std::int64_t tag, Block elements) {
    const Block from = codec_ == nullptr || elements.size_bytes == 0 ? elements : reserve(elements);
    round_->receive(incoming.transfers, source, tag, from);
    incoming.encoded.emplace_back(from, elements);
  }

  void finish(Incoming& incoming) {
    round_->finish(incoming.transfers);
    for (const auto& [from, elements] : incoming.encoded) decode(from, elements);
    incoming.encoded.clear();
  }

 private:
  Block reserve(Block elements) {
    if (used_ == pieces_.size()) pieces_.push_back(round_->scratch(piece_bytes_));
    return {pieces_[used_++], codec_->size_bytes(elements.size_bytes / item_)};
  }

  Round* round_;
  const Codec* codec_;
  std::size_t item_, piece_bytes_, used_ = 0;
  std::vector<std::byte*> pieces_;
};

// A reduction to all ranks, or to `root`, whose data alone change then. A message is cut in blocks, a block
// in a share for each worker.
class Reduction {
 public:
  Reduction(Round& round, std::byte* data, std::size_t count, Dtype dtype, Op op, int root,
            const Encoding& encoding)
      : round_(round),
        local_(round.local),
        at_(round.at),
        data_(data),
        item_(size_bytes(dtype)),
        dtype_(dtype),
        partial_(partial(op, dtype)),
        divides_(op != partial_),
        kernel_(find_kernel(dtype, partial_)),
        root_host_(root < 0 ? kAllHosts : at_.host_of(root)),
        keeps_(root < 0 || root == at_.rank),
        lost_(encoding.lost),
        workers_(at_.ranks[0].size()) {
    for (const auto& ranks : at_.ranks) workers_ = std::min(workers_, ranks.size());
    shares_ = {count * item_, at_.share_bytes * workers_, workers_};
    if (at_.share_bytes == 0 || at_.share_bytes % Shares::kLine != 0 ||
        shares_.block > local_.shape().slot_bytes)
      throw Error(Code::kArgument, "shares of " + std::to_string(at_.share_bytes) +
                                       " bytes do not fit slots of " +
                                       std::to_string(local_.shape().slot_bytes));
    const std::size_t used = std::min(at_.share_bytes, shares_.size);
    if (works())
      for (auto& stage : stages_) {
        stage.wire.emplace(round, find_codec(encoding.compression, dtype, op), dtype, used);
        stage.parts = round.scratch(used * at_.ranks.size());
        stage.share = keeps_ ? nullptr : round.scratch(used);
      }
  }

  void run() {
    if (round_.has_neighbours()) round_.group.count_shared(shares_.size);
    const std::size_t blocks = shares_.blocks();
    for (std::size_t i = 0; i < blocks + kPublish; ++i) {
      if (i < blocks) copy_in(i);
      if (i >= kPublish && works() && has_result(round_.host)) publish(i - kPublish);
      local_.synchronize(round_.operation);
      if (i < blocks && works()) exchange_parts(i);
      if (i >= kCombine && i - kCombine < blocks && works()) combine(i - kCombine);
      if (i >= kPublish && keeps_) copy_out(i - kPublish);
    }
    for (auto& stage : stages_) round_.finish(stage.sent);
  }

 private:
  // The stages of a block; each is one iteration behind the one before.
  static constexpr std::size_t kCombine = 1, kPublish = 3;
  static constexpr std::size_t kAllHosts = ~std::size_t{0};

  struct Stage {
    std::byte* parts = nullptr;
    std::byte* share = nullptr;  // where data keep their values
    std::optional<Wire> wire;
    Wire::Incoming parts_in, sums_in;
    Transfers sent;
  };

  bool works() const { return round_.mine < workers_; }
  bool has_result(std::size_t host) const { return root_host_ == kAllHosts || root_host_ == host; }
  Stage& stage(std::size_t block) { return stages_[block % stages_.size()]; }

  // This worker's share.
  Block own(std::size_t block) {
    const auto span = shares_.of(block, round_.mine);
    return {keeps_ ? data_ + span.start : stage(block).share, span.size};
  }

  // The part of a share that a host adds up.
  Block part_of(Block share, std::size_t host) const {
    const std::size_t count = share.size_bytes / item_, all = at_.ranks.size();
    const std::size_t from = count * host / all, to = count * (host + 1) / all;
    return {share.data + from * item_, (to - from) * item_};
  }

  // Where the losses of a part of the data go.
  float* lost(Block part) const {
    return lost_ == nullptr ? nullptr : lost_ + static_cast<std::size_t>(part.data - data_) / item_;
  }

  // Publishes the shares that other ranks of this host add up.
  void copy_in(std::size_t block) {
    std::byte* slot = local_.next_slot(shares_.block);
    const std::size_t start = block * shares_.block;
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      const auto span = shares_.of(block, worker);
      if (worker != round_.mine && span.size != 0)
        std::memcpy(slot + (span.start - start), data_ + span.start, span.size);
    }
  }

  void exchange_parts(std::size_t block) {
    Stage& now = stage(block);
    round_.finish(now.sent);
    const auto span = shares_.of(block, round_.mine);
    const Block sum = own(block);
    if (span.size != 0 && (round_.has_neighbours() || !keeps_)) {
      std::vector<const std::byte*> sources;
      for (int rank = 0; rank < local_.size(); ++rank)
        sources.push_back(rank == local_.rank() ? data_ + span.start
                                                : local_.slot(rank) + (span.start - block * shares_.block));
      kernel_(sources.data(), local_.size(), sum.data, sum.size_bytes / item_);
    }
    now.wire->begin();
    std::byte* into = now.parts;
    const std::size_t kept = part_of(sum, round_.host).size_bytes;
    round_.for_other_hosts([&](std::size_t host) {
      now.wire->receive(now.parts_in, counterpart(host), kParts, {into, kept});
      into += kept;
      const Block away = part_of(sum, host);
      round_.send(now.sent, counterpart(host), kParts, now.wire->encoded(away, lost(away)));
      // It comes after that host has got our part of it.
      if (has_result(round_.host)) now.wire->receive(now.sums_in, counterpart(host), kSums, away);
    });
  }

  void combine(std::size_t block) {
    Stage& now = stage(block);
    now.wire->finish(now.parts_in);
    const Block kept = part_of(own(block), round_.host);
    if (kept.size_bytes == 0) return;
    std::vector<const std::byte*> sources;
    const std::byte* from = now.parts;
    for (std::size_t host = 0; host < at_.ranks.size(); ++host) {
      round_.add_source(sources, host, partial_, host == round_.host ? kept.data : from);
      if (host != round_.host) from += kept.size_bytes;
    }
    const std::size_t count = kept.size_bytes / item_;
    kernel_(sources.data(), static_cast<int>(sources.size()), kept.data, count);
    if (divides_) divide(dtype_, kept.data, count, static_cast<int>(round_.size()));
    const Block sum = now.wire->encoded(kept, lost(kept));
    now.wire->decode(sum, kept);  // what the others get
    round_.for_other_hosts([&](std::size_t host) {
      if (has_result(host)) round_.send(now.sent, counterpart(host), kSums, sum);
    });
  }

  void publish(std::size_t block) {
    stage(block).wire->finish(stage(block).sums_in);
    const Block sum = own(block);
    std::byte* result = local_.next_result(sum.size_bytes);
    if (round_.has_neighbours() && sum.size_bytes != 0) std::memcpy(result, sum.data, sum.size_bytes);
  }

  void copy_out(std::size_t block) {
    for (std::size_t i = 0; i < workers_; ++i) {
      const std::size_t worker = (round_.mine + i) % workers_;
      const auto span = shares_.of(block, worker);
      if (worker != round_.mine && span.size != 0)
        std::memcpy(data_ + span.start, local_.result(static_cast<int>(worker)), span.size);
    }
  }

  int counterpart(std::size_t host) const { return at_.ranks[host][round_.mine]; }

  Round& round_;
  SharedGroup& local_;
  const Hosts& at_;
  std::byte* data_;
  const std::size_t item_;
  const Dtype dtype_;
  const Op partial_;
  const bool divides_;
  const Kernel kernel_;
  const std::size_t root_host_;
  const bool keeps_;   // the result
  float* const lost_;  // of an all_reduce; may be null
  std::size_t workers_;
  Shares shares_{};
  std::array<Stage, kPublish + 1> stages_;
};

// In pieces: each is reduced to the leader, summed in the network while the next one is reduced, and
// broadcast.
void reduce_in_network(Round& round, std::byte* data, std::size_t count, Dtype dtype, Op op,
                       const NetworkSum& network) {
  const std::size_t item = size_bytes(dtype);
  const std::size_t most = std::max<std::size_t>(1, network.piece_bytes / item);
  const bool leads = round.mine == 0;
  const auto length = [&](std::size_t first) { return std::min(most, count - first); };
  for (std::size_t first = 0; first < count + most; first += most) {
    if (first < count) {
      if (round.has_neighbours()) {
        round.group.count_shared(length(first) * item);
        torchrelay::reduce(round.local, round.operation, data + first * item, length(first), dtype,
                           partial(op, dtype), 0);
      }
      if (leads) network.start(first, length(first), round.left());
    }
    if (first < most) continue;
    const std::size_t before = first - most;
    if (leads) network.finish();
    round.broadcast_here({data + before * item, length(before) * item}, round.here()[0]);
  }
}

// The reduction of the ranks' payloads, in the order of the ranks. `data` is not written before all agree.
void reduce_any(HostGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
                Op op, const std::byte* source, int root, const NetworkSum* network,
                const Encoding& encoding) {
  const Kernel kernel = find_kernel(dtype, op);
  perform(group, operation, [&](Round& round) {
    const bool is_in_place = source == nullptr || source == data;
    const Block mine{is_in_place ? data : const_cast<std::byte*>(source), count * size_bytes(dtype)};
    const Kind kind = root < 0 ? Kind::kAllReduce : Kind::kReduce;
    const Call call = reduction_call(kind, count, dtype, op, root, encoding.compression);
    const auto payloads = round.agree({call}, mine, mine.size_bytes);
    if (count == 0) return;
    if (payloads.empty() && !is_in_place) std::memcpy(data, source, mine.size_bytes);
    if (network != nullptr && payloads.empty())
      reduce_in_network(round, data, count, dtype, op, *network);
    else if (payloads.empty())
      Reduction(round, data, count, dtype, op, root, encoding).run();
    else if (root < 0 || root == round.at.rank)
      kernel(payloads.data(), static_cast<int>(payloads.size()), data, count);
  });
}

// Moves each rank's `own` block to or from the root.
template <class Local>
void move_with_root(Round& round, Block own, const std::vector<Block>& blocks, int root, bool to_root,
                    Local in_host) {
  Transfers moving;
  const auto move = [&](bool sends, int peer, Block block) {
    if (sends)
      round.send(moving, peer, kParts, block);
    else
      round.receive(moving, peer, kParts, block);
  };
  if (!round.is_here(root)) {
    move(to_root, root, own);
  } else {
    if (root == round.at.rank)
      round.for_other_hosts([&](std::size_t host) {
        for (const int rank : round.at.ranks[host])
          move(!to_root, rank, blocks[static_cast<std::size_t>(rank)]);
      });
    round.group.count_shared(own.size_bytes);
    in_host(round.here(blocks), round.index_here(root));
  }
  round.finish(moving);
}

void require_blocks(const HostGroup& group, const Operation& operation, std::size_t given) {
  const std::size_t needed = group.hosts().names.size();
  if (given != needed)
    throw Error(Code::kArgument, std::string(operation.name) + ": " + std::to_string(given) +
                                     " blocks for a group of " + std::to_string(needed) + " ranks");
}

void require_root(const HostGroup& group, const Operation& operation, int root) {
  if (root < 0 || static_cast<std::size_t>(root) >= group.hosts().names.size())
    throw Error(Code::kArgument, std::string(operation.name) + ": there is no rank " + std::to_string(root) +
                                     " in a group of " + std::to_string(group.hosts().names.size()));
}

// Compares what each rank sends to each other with what that one expects.
void agree_on_pairs(Round& round, const Sizes& sends, const Sizes& expects) {
  const std::size_t n = round.size(), width = 2 * n * sizeof(std::uint64_t);
  std::vector<std::byte> row(width);
  std::memcpy(row.data(), sends.data(), width / 2);
  std::memcpy(row.data() + width / 2, expects.data(), width / 2);
  const auto rows = round.share(row);
  Sizes table(n * 2 * n);
  std::memcpy(table.data(), rows.data(), rows.size());
  for (std::size_t from = 0; from < n; ++from)
    for (std::size_t to = 0; to < n; ++to) {
      const std::uint64_t sent = table[from * 2 * n + to], expected = table[to * 2 * n + n + from];
      if (sent != expected)
        round.differ("the ranks do not agree on sizes: rank " + std::to_string(round.at.names[from]) +
                     " sends " + std::to_string(sent) + " bytes to rank " +
                     std::to_string(round.at.names[to]) + ", which expects " + std::to_string(expected) +
                     "; check the shapes and split sizes on both");
    }
}

// The pieces of a reduce_scatter that are in progress.
struct Scattered {
  std::optional<Wire> wire;
  std::vector<std::byte*> sums, parts;
  Transfers sent;
  Wire::Incoming received;
};

}  // namespace

std::size_t Hosts::host_of(int of) const {
  const auto found = std::ranges::find_if(
      ranks, [of](const auto& each) { return std::ranges::find(each, of) != each.end(); });
  return static_cast<std::size_t>(found - ranks.begin());
}

void HostGroup::require_whole() const {
  if (const auto failure = messenger_.failure())
    throw Error(
        failure->code(),
        "rank " + std::to_string(name()) +
            ": this group failed before and cannot be used any more. The cause was: " + failure->what(),
        failure->ranks());
}

void all_reduce(HostGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
                Op op, const std::byte* source, const NetworkSum* network, const Encoding& encoding) {
  reduce_any(group, operation, data, count, dtype, op, source, -1, network, encoding);
}

void reduce(HostGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
            Op op, int root, Compression compression) {
  require_root(group, operation, root);
  reduce_any(group, operation, data, count, dtype, op, nullptr, root, nullptr, {compression});
}

void reduce_scatter(HostGroup& group, const Operation& operation, const std::vector<std::byte*>& inputs,
                    std::byte* output, std::size_t count, Dtype dtype, Op op, Compression compression) {
  require_blocks(group, operation, inputs.size());
  const Op each_op = partial(op, dtype);
  const Kernel kernel = find_kernel(dtype, each_op);
  perform(group, operation, [&](Round& round) {
    round.agree({reduction_call(Kind::kReduceScatter, count, dtype, op, -1, compression)});
    const Hosts& at = round.at;
    const std::size_t item = size_bytes(dtype), size = count * item;
    const std::size_t limit = std::max<std::size_t>(1, at.piece_bytes / item) * item;
    const std::size_t width = std::min(limit, size), neighbours = round.here().size();
    if (round.has_neighbours()) group.count_shared(size * inputs.size());
    std::array<Scattered, 2> in_progress;
    for (auto& each : in_progress) {
      each.wire.emplace(round, find_codec(compression, dtype, op), dtype, width);
      round.for_other_hosts([&](std::size_t host) {
        each.parts.push_back(round.scratch(width));
        for (std::size_t i = 0; round.has_neighbours() && i < at.ranks[host].size(); i += neighbours)
          each.sums.push_back(round.scratch(width));
      });
    }
    const auto reduce_here = [&](const std::vector<std::byte*>& blocks, std::byte* into, std::size_t offset,
                                 std::size_t length) {
      std::vector<std::byte*> sources;
      for (std::byte* block : blocks) sources.push_back(block + offset);
      torchrelay::reduce_scatter(round.local, round.operation, sources, into, length / item, dtype, each_op);
    };
    // Sends this host's sums of others' blocks to their owners.
    const auto start = [&](std::size_t offset, Scattered& now) {
      round.finish(now.sent);
      now.wire->begin();
      const std::size_t length = std::min(limit, size - offset);
      auto part_at = now.parts.begin();
      round.for_other_hosts([&](std::size_t host) {
        now.wire->receive(now.received, round.counterpart(host, round.mine), kParts, {*part_at++, length});
      });
      auto sum = now.sums.begin();
      round.for_other_hosts([&](std::size_t host) {
        const auto& owners = at.ranks[host];
        for (std::size_t first = 0; first < owners.size(); first += neighbours) {
          // The last ones have none, where that host has more ranks: they add up any block.
          std::vector<std::byte*> blocks;
          for (std::size_t i = first; i < first + neighbours; ++i)
            blocks.push_back(inputs[static_cast<std::size_t>(i < owners.size() ? owners[i] : owners[first])]);
          const std::size_t own = first + round.mine;
          std::byte* into = blocks[0] + offset;
          if (round.has_neighbours()) reduce_here(blocks, into = *sum++, offset, length);
          if (own < owners.size())
            round.send(now.sent, owners[own], kParts, now.wire->encoded({into, length}));
        }
      });
      reduce_here(round.here(inputs), output + offset, offset, length);
    };
    const auto end = [&](std::size_t offset, Scattered& now) {
      now.wire->finish(now.received);
      const std::size_t elements = std::min(limit, size - offset) / item;
      std::vector<const std::byte*> sources;
      auto part_at = now.parts.begin();
      for (std::size_t host = 0; host < at.ranks.size(); ++host)
        round.add_source(sources, host, each_op, host == round.host ? output + offset : *part_at++);
      kernel(sources.data(), static_cast<int>(sources.size()), output + offset, elements);
      if (op != each_op) divide(dtype, output + offset, elements, static_cast<int>(round.size()));
    };
    for (std::size_t offset = 0; offset < size; offset += limit) {
      start(offset, in_progress[offset / limit % 2]);
      if (offset != 0) end(offset - limit, in_progress[(offset / limit - 1) % 2]);
    }
    if (size != 0) end((size - 1) / limit * limit, in_progress[(size - 1) / limit % 2]);
    for (auto& each : in_progress) round.finish(each.sent);
  });
}

void broadcast(HostGroup& group, const Operation& operation, Block data, std::uint8_t code, int root) {
  require_root(group, operation, root);
  perform(group, operation, [&](Round& round) {
    const auto payloads =
        round.agree({bytes_call(Kind::kBroadcast, code, root, data.size_bytes)}, data, data.size_bytes);
    if (!payloads.empty()) {
      if (root != round.at.rank && data.size_bytes != 0)
        std::memcpy(data.data, payloads[static_cast<std::size_t>(root)], data.size_bytes);
      return;
    }
    // From host to host in a chain, which the root's starts; a single piece from the root to all.
    const auto& hosts = round.at.ranks;
    const std::size_t first = round.at.host_of(root), all = hosts.size(), limit = round.at.piece_bytes;
    const auto leader = [&](std::size_t place) {
      return place == 0 ? root : hosts[(first + place) % all][0];
    };
    const std::size_t place = (round.host + all - first) % all;
    const bool leads = leader(place) == round.at.rank, is_chain = data.size_bytes > limit;
    std::vector<int> targets;
    if (leads && is_chain && place + 1 < all) targets = {leader(place + 1)};
    if (leads && !is_chain && place == 0)
      for (std::size_t i = 1; i < all; ++i) targets.push_back(leader(i));
    std::vector<Transfers> incoming((data.size_bytes + limit - 1) / limit);
    Transfers outgoing;
    for (std::size_t i = 0; leads && place != 0 && i < incoming.size(); ++i)
      round.receive(incoming[i], leader(is_chain ? place - 1 : 0), kParts, part(data, i * limit, limit));
    for (std::size_t i = 0; i < incoming.size(); ++i) {
      round.finish(incoming[i]);
      for (const int target : targets) round.send(outgoing, target, kParts, part(data, i * limit, limit));
      round.broadcast_here(part(data, i * limit, limit), leader(place));
    }
    round.finish(outgoing);
  });
}

void all_gather(HostGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
                std::uint8_t code) {
  require_blocks(group, operation, outputs.size());
  perform(group, operation, [&](Round& round) {
    const Sizes sizes = sizes_of(outputs);
    const std::size_t largest = *std::ranges::max_element(sizes);
    const auto payloads =
        round.agree({bytes_call(Kind::kAllGather, code), input.size_bytes, hash_of(sizes)}, input, largest);
    for (std::size_t rank = 0; rank < payloads.size(); ++rank)
      if (outputs[rank].size_bytes != 0)
        std::memmove(outputs[rank].data, payloads[rank], outputs[rank].size_bytes);
    if (!payloads.empty()) return;
    const std::size_t limit = round.at.piece_bytes, neighbours = round.here().size();
    const std::size_t pieces = (largest + limit - 1) / limit;
    // What the ranks of this host get at a time: a block for each, the last ones none.
    std::vector<std::vector<Block>> turns;
    std::vector<Transfers> incoming;  // of this rank, by turn and piece
    Transfers outgoing;
    round.for_other_hosts([&](std::size_t host) {
      for (std::size_t piece = 0; piece < pieces; ++piece)
        round.send(outgoing, round.counterpart(host, round.mine), kParts, part(input, piece * limit, limit));
      const auto& others = round.at.ranks[host];
      for (std::size_t first = 0; first < others.size(); first += neighbours) {
        turns.emplace_back(neighbours);
        for (std::size_t i = 0; i < neighbours && first + i < others.size(); ++i)
          turns.back()[i] = outputs[static_cast<std::size_t>(others[first + i])];
        for (std::size_t piece = 0; piece < pieces; ++piece) {
          incoming.emplace_back();
          if (const std::size_t own = first + round.mine; own < others.size())
            round.receive(incoming.back(), others[own], kParts,
                          part(turns.back()[round.mine], piece * limit, limit));
        }
      }
    });
    group.count_shared(round.has_neighbours() ? input.size_bytes : 0);
    torchrelay::all_gather(round.local, round.operation, input, round.here(outputs), code);
    for (std::size_t piece = 0; piece < pieces; ++piece)
      for (std::size_t turn = 0; turn < turns.size(); ++turn) {
        round.finish(incoming[turn * pieces + piece]);
        if (!round.has_neighbours()) continue;
        std::vector<Block> parts;
        for (const Block& block : turns[turn]) parts.push_back(part(block, piece * limit, limit));
        group.count_shared(parts[round.mine].size_bytes);
        torchrelay::all_gather(round.local, round.operation, parts[round.mine], parts, code);
      }
    round.finish(outgoing);
  });
}

void gather(HostGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
            std::uint8_t code, int root) {
  require_root(group, operation, root);
  if (group.hosts().rank == root) require_blocks(group, operation, outputs.size());
  perform(group, operation, [&](Round& round) {
    round.agree({bytes_call(Kind::kGather, code, root), input.size_bytes, hash_of(sizes_of(outputs))});
    move_with_root(round, input, outputs, root, true, [&](const std::vector<Block>& here, int index) {
      torchrelay::gather(round.local, round.operation, input, here, code, index);
    });
  });
}

void scatter(HostGroup& group, const Operation& operation, const std::vector<Block>& inputs, Block output,
             std::uint8_t code, int root) {
  require_root(group, operation, root);
  if (group.hosts().rank == root) require_blocks(group, operation, inputs.size());
  perform(group, operation, [&](Round& round) {
    round.agree({bytes_call(Kind::kScatter, code, root), output.size_bytes, hash_of(sizes_of(inputs))});
    move_with_root(round, output, inputs, root, false, [&](const std::vector<Block>& here, int index) {
      torchrelay::scatter(round.local, round.operation, here, output, code, index);
    });
  });
}

void all_to_all(HostGroup& group, const Operation& operation, const std::vector<Block>& inputs,
                const std::vector<Block>& outputs, std::uint8_t code) {
  require_blocks(group, operation, inputs.size());
  require_blocks(group, operation, outputs.size());
  perform(group, operation, [&](Round& round) {
    const Sizes sends = sizes_of(inputs), expects = sizes_of(outputs);
    const auto is_first = [&](std::uint64_t size) { return size == sends[0]; };
    const bool is_uniform = std::ranges::all_of(sends, is_first) && std::ranges::all_of(expects, is_first);
    round.agree({bytes_call(Kind::kAllToAll, code), is_uniform ? sends[0] : kAnySize});
    if (std::ranges::any_of(round.records, [&](const Record& each) {
          return each.mine == kAnySize || each.mine != round.records[0].mine;
        }))
      agree_on_pairs(round, sends, expects);
    Transfers moving;
    round.for_other_hosts([&](std::size_t host) {
      for (const int rank : round.at.ranks[host]) {
        round.receive(moving, rank, kParts, outputs[static_cast<std::size_t>(rank)]);
        round.send(moving, rank, kParts, inputs[static_cast<std::size_t>(rank)]);
      }
    });
    for (const Block& block : round.here(inputs)) group.count_shared(block.size_bytes);
    torchrelay::all_to_all(round.local, round.operation, round.here(inputs), round.here(outputs), code);
    round.finish(moving);
  });
}

void barrier(HostGroup& group, const Operation& operation) { agree(group, operation, {Kind::kBarrier}); }

void agree(HostGroup& group, const Operation& operation, const Call& call) {
  perform(group, operation, [&](Round& round) { round.agree({call}); });
}

}  // namespace torchrelay
