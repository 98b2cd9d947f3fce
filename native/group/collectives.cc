#include "group/collectives.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "group/shares.h"

namespace torchrelay {
namespace {

// What is reduced at a time is copied on while it is still in L1.
constexpr std::size_t kPiece = std::size_t{16} << 10;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t size_bytes) {
  if (size_bytes != 0 && to != from) std::memcpy(to, from, size_bytes);
}

// The part of a block of `size` bytes that starts at `offset`, at most `limit` long.
std::size_t part(std::size_t size, std::size_t offset, std::size_t limit) {
  return offset >= size ? 0 : std::min(limit, size - offset);
}

// Writes the reduction of sources to `first` and `second`, where these are not null.
class Reducer {
 public:
  Reducer(SharedGroup& group, Dtype dtype, Op op)
      : kernel_(find_kernel(dtype, op)),
        item_(size_bytes(dtype)),
        sources_(static_cast<std::size_t>(group.size())) {}

  std::vector<const std::byte*>& sources() { return sources_; }

  void run(std::byte* first, std::byte* second, std::size_t size) {
    std::vector<const std::byte*>& at = sources_;
    for (std::size_t done = 0; done < size; done += kPiece) {
      const std::size_t piece = std::min(kPiece, size - done);
      std::byte* out = (first != nullptr ? first : second) + done;
      kernel_(at.data(), static_cast<int>(at.size()), out, piece / item_);
      if (first != nullptr && second != nullptr) std::memcpy(second + done, out, piece);
      for (auto& source : at) source += piece;
    }
  }

 private:
  Kernel kernel_;
  std::size_t item_;
  std::vector<const std::byte*> sources_;
};

// One block for each rank, where this rank must give them.
void require_blocks(const SharedGroup& group, const Operation& operation, std::size_t given) {
  const auto needed = static_cast<std::size_t>(group.size());
  if (given != needed)
    throw Error(Code::kArgument, std::string(operation.name) + ": " + std::to_string(given) +
                                     " blocks for a group of " + std::to_string(needed) + " ranks");
}

// Everybody publishes everything, everybody reduces everything.
void reduce_in_one_step(SharedGroup& group, const Operation& operation, const Call& call,
                        const std::byte* source, std::byte* data, Reducer& reducer, std::size_t size) {
  copy_bytes(group.next_slot(size), source, size);
  group.synchronize(operation, call);
  if (call.root >= 0 && call.root != group.rank()) return;
  for (int r = 0; r < group.size(); ++r)
    reducer.sources()[static_cast<std::size_t>(r)] = r == group.rank() ? source : group.slot(r);
  reducer.run(data, nullptr, size);
}

// Rank r reduces share r of every block.
class Pipeline {
 public:
  Pipeline(SharedGroup& group, const std::byte* source, std::byte* data, std::size_t size)
      : group_(group),
        source_(source),
        data_(data),
        mine_(static_cast<std::size_t>(group.rank())),
        ranks_(static_cast<std::size_t>(group.size())),
        shares_{size, group.shape().slot_bytes / Shares::kLine / ranks_ * Shares::kLine * ranks_, ranks_} {}

  std::size_t blocks() const { return shares_.blocks(); }

  // Publishes the shares that others reduce.
  void copy_in(std::size_t block) {
    std::byte* slot = group_.next_slot(shares_.length(block));
    for (std::size_t r = 0; r < ranks_; ++r)
      if (r != mine_) {
        const auto [start, size] = shares_.of(block, r);
        copy_bytes(slot + (start - block * shares_.block), source_ + start, size);
      }
  }

  void reduce(std::size_t block, Reducer& reducer, bool keep) {
    const auto [start, size] = shares_.of(block, mine_);
    for (std::size_t r = 0; r < ranks_; ++r)
      reducer.sources()[r] =
          r == mine_ ? source_ + start : group_.slot(static_cast<int>(r)) + (start - block * shares_.block);
    reducer.run(keep ? data_ + start : nullptr, group_.next_result(size), size);
  }

  void copy_out(std::size_t block) {
    for (std::size_t i = 1; i < ranks_; ++i) {
      const std::size_t r = (mine_ + i) % ranks_;
      const auto [start, size] = shares_.of(block, r);
      copy_bytes(data_ + start, group_.result(static_cast<int>(r)), size);
    }
  }

 private:
  SharedGroup& group_;
  const std::byte* source_;
  std::byte* data_;
  const std::size_t mine_, ranks_;
  const Shares shares_;
};

void reduce_in_blocks(SharedGroup& group, const Operation& operation, const Call& call,
                      const std::byte* source, std::byte* data, Reducer& reducer, std::size_t size) {
  const bool keep = call.root < 0 || call.root == group.rank();
  Pipeline pipeline(group, source, data, size);
  const std::size_t blocks = pipeline.blocks();
  pipeline.copy_in(0);
  group.synchronize(operation, call);
  for (std::size_t block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) pipeline.copy_in(block + 1);
    pipeline.reduce(block, reducer, keep);
    if (block > 0 && keep) pipeline.copy_out(block - 1);
    group.synchronize(operation);
  }
  if (keep) pipeline.copy_out(blocks - 1);
}

void reduce_any(SharedGroup& group, const Operation& operation, const Call& call, const std::byte* source,
                std::byte* data, Dtype dtype) {
  Reducer reducer(group, dtype, call.op);
  const std::size_t size = call.count * size_bytes(dtype);
  const auto others = static_cast<std::size_t>(std::max(1, group.size() - 1));
  if (size * others <= group.shape().one_shot_bytes)
    reduce_in_one_step(group, operation, call, source, data, reducer, size);
  else
    reduce_in_blocks(group, operation, call, source, data, reducer, size);
}

std::vector<std::size_t> sizes(const std::vector<Block>& blocks) {
  std::vector<std::size_t> out;
  out.reserve(blocks.size());
  for (const Block& block : blocks) out.push_back(block.size_bytes);
  return out;
}

// Each rank publishes one block; those with outputs copy out every other rank's.
void spread(SharedGroup& group, const Operation& operation, const Call& call, Block input,
            const std::vector<std::size_t>& sends, const std::vector<Block>& outputs) {
  const std::size_t limit = group.shape().slot_bytes;
  const auto n = static_cast<std::size_t>(group.size());
  std::vector<std::size_t> receives = sizes(outputs);
  receives.resize(n);
  std::size_t largest = 1;
  for (std::size_t offset = 0; offset == 0 || offset < largest; offset += limit) {
    const std::size_t length = part(input.size_bytes, offset, limit);
    copy_bytes(group.next_slot(length), input.data + offset, length);
    if (offset == 0)
      largest = group.synchronize(operation, call, sends, receives);
    else
      group.synchronize(operation);
    for (std::size_t i = 1; i < n && !outputs.empty(); ++i) {
      const auto r = (static_cast<std::size_t>(group.rank()) + i) % n;
      copy_bytes(outputs[r].data + offset, group.slot(static_cast<int>(r)),
                 part(outputs[r].size_bytes, offset, limit));
    }
  }
}

// Each rank publishes a section for each other rank, and copies out its own section of theirs.
void exchange(SharedGroup& group, const Operation& operation, const Call& call,
              const std::vector<Block>& inputs, const std::vector<Block>& outputs) {
  const auto n = static_cast<std::size_t>(group.size());
  const std::size_t limit = group.shape().slot_bytes / Shares::kLine / n * Shares::kLine;
  const auto mine = static_cast<std::size_t>(group.rank());
  std::size_t largest = 1;
  for (std::size_t offset = 0; offset == 0 || offset < largest; offset += limit) {
    std::byte* slot = group.next_slot(n * limit);
    for (std::size_t r = 0; r < n; ++r)
      if (r != mine)
        copy_bytes(slot + r * limit, inputs[r].data + offset, part(inputs[r].size_bytes, offset, limit));
    if (offset == 0)
      largest = group.synchronize(operation, call, sizes(inputs), sizes(outputs));
    else
      group.synchronize(operation);
    for (std::size_t i = 1; i < n; ++i) {
      const std::size_t r = (mine + i) % n;
      copy_bytes(outputs[r].data + offset, group.slot(static_cast<int>(r)) + mine * limit,
                 part(outputs[r].size_bytes, offset, limit));
    }
  }
  copy_bytes(outputs[mine].data, inputs[mine].data,
             std::min(inputs[mine].size_bytes, outputs[mine].size_bytes));
}

}  // namespace

void all_reduce(SharedGroup& group, const Operation& operation, std::byte* data, std::size_t count,
                Dtype dtype, Op op, const std::byte* source) {
  const Call call = reduction_call(Kind::kAllReduce, count, dtype, op);
  reduce_any(group, operation, call, source == nullptr ? data : source, data, dtype);
}

void reduce(SharedGroup& group, const Operation& operation, std::byte* data, std::size_t count, Dtype dtype,
            Op op, int root) {
  group.require_rank(operation.name, root);
  reduce_any(group, operation, reduction_call(Kind::kReduce, count, dtype, op, root), data, data, dtype);
}

void reduce_scatter(SharedGroup& group, const Operation& operation, const std::vector<std::byte*>& inputs,
                    std::byte* output, std::size_t count, Dtype dtype, Op op) {
  require_blocks(group, operation, inputs.size());
  Reducer reducer(group, dtype, op);
  const auto n = static_cast<std::size_t>(group.size());
  const auto mine = static_cast<std::size_t>(group.rank());
  const std::size_t limit = group.shape().slot_bytes / Shares::kLine / n * Shares::kLine;
  const std::size_t size = count * size_bytes(dtype);
  const std::size_t stride = std::min(limit, (size + Shares::kLine - 1) / Shares::kLine * Shares::kLine);
  const Call call = reduction_call(Kind::kReduceScatter, count, dtype, op);
  for (std::size_t offset = 0; offset == 0 || offset < size; offset += limit) {
    const std::size_t length = part(size, offset, limit);
    std::byte* slot = group.next_slot(n * stride);
    for (std::size_t r = 0; r < n; ++r)
      if (r != mine) copy_bytes(slot + r * stride, inputs[r] + offset, length);
    if (offset == 0)
      group.synchronize(operation, call);
    else
      group.synchronize(operation);
    for (std::size_t r = 0; r < n; ++r)
      reducer.sources()[r] = r == mine ? inputs[r] + offset : group.slot(static_cast<int>(r)) + mine * stride;
    reducer.run(output + offset, nullptr, length);
  }
}

void broadcast(SharedGroup& group, const Operation& operation, Block data, std::uint8_t code, int root) {
  group.require_rank(operation.name, root);
  const Call call = bytes_call(Kind::kBroadcast, code, root, data.size_bytes);
  const std::size_t limit = group.shape().slot_bytes;
  const bool is_root = group.rank() == root;
  for (std::size_t offset = 0; offset == 0 || offset < data.size_bytes; offset += limit) {
    const std::size_t length = part(data.size_bytes, offset, limit);
    if (is_root) copy_bytes(group.next_slot(length), data.data + offset, length);
    if (offset == 0)
      group.synchronize(operation, call);
    else
      group.synchronize(operation);
    if (!is_root) copy_bytes(data.data + offset, group.slot(root), length);
  }
}

void all_gather(SharedGroup& group, const Operation& operation, Block input,
                const std::vector<Block>& outputs, std::uint8_t code) {
  require_blocks(group, operation, outputs.size());
  const std::vector<std::size_t> sends(static_cast<std::size_t>(group.size()), input.size_bytes);
  spread(group, operation, bytes_call(Kind::kAllGather, code), input, sends, outputs);
  const Block& own = outputs[static_cast<std::size_t>(group.rank())];
  copy_bytes(own.data, input.data, own.size_bytes);
}

void gather(SharedGroup& group, const Operation& operation, Block input, const std::vector<Block>& outputs,
            std::uint8_t code, int root) {
  group.require_rank(operation.name, root);
  const bool is_root = group.rank() == root;
  if (is_root) require_blocks(group, operation, outputs.size());
  std::vector<std::size_t> sends(static_cast<std::size_t>(group.size()), 0);
  sends[static_cast<std::size_t>(root)] = input.size_bytes;
  spread(group, operation, bytes_call(Kind::kGather, code, root), input, sends,
         is_root ? outputs : std::vector<Block>{});
  if (is_root) {
    const Block& own = outputs[static_cast<std::size_t>(root)];
    copy_bytes(own.data, input.data, own.size_bytes);
  }
}

void scatter(SharedGroup& group, const Operation& operation, const std::vector<Block>& inputs, Block output,
             std::uint8_t code, int root) {
  group.require_rank(operation.name, root);
  if (group.rank() == root) require_blocks(group, operation, inputs.size());
  const std::vector<Block> nothing(static_cast<std::size_t>(group.size()));
  std::vector<Block> outputs = nothing;
  outputs[static_cast<std::size_t>(root)] = output;
  exchange(group, operation, bytes_call(Kind::kScatter, code, root), group.rank() == root ? inputs : nothing,
           outputs);
}

void all_to_all(SharedGroup& group, const Operation& operation, const std::vector<Block>& inputs,
                const std::vector<Block>& outputs, std::uint8_t code) {
  require_blocks(group, operation, inputs.size());
  require_blocks(group, operation, outputs.size());
  exchange(group, operation, bytes_call(Kind::kAllToAll, code), inputs, outputs);
}

void barrier(SharedGroup& group, const Operation& operation) { agree(group, operation, {Kind::kBarrier}); }

Call coalesced_call(std::span<const Collective> calls, int rank) {
  std::uint64_t digest = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&digest](std::uint64_t value) {
    for (unsigned shift = 0; shift < 64; shift += 8)
      digest = (digest ^ ((value >> shift) & 0xff)) * 0x100000001b3;
  };
  for (const Collective& call : calls) {
    for (const auto value : {static_cast<int>(call.kind), int{call.code}, static_cast<int>(call.op),
                             call.root, static_cast<int>(call.encoding.compression)})
      add(static_cast<std::uint64_t>(value));
    for (const Block& block : call.outputs) add(block.size_bytes);
    if (call.kind == Kind::kReduceScatter)
      for (const Block& block : call.inputs) add(block.size_bytes);
    // Inputs may differ between ranks, but not from what all of them expect.
    const auto me = static_cast<std::size_t>(rank);
    if (call.kind == Kind::kAllGather && me < call.outputs.size() &&
        call.inputs[0].size_bytes != call.outputs[me].size_bytes)
      add(me);
  }
  return bytes_call(Kind::kCoalesced, kNumDtypes, static_cast<int>(calls.size()), digest);
}

void agree(SharedGroup& group, const Operation& operation, const Call& call) {
  group.synchronize(operation, call);
}

}  // namespace torchrelay
