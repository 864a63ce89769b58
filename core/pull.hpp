// A pull: bytes of a cache at the peer into a cache of this node, by the transport that suits both.
//
//   begin -> [resolve the target at the owner, fetch segments] -> plan -> copy one-sided (map, cma)
//                                                                      -> or ask for a stream (socket)
//         -> [tell the owner that a key was consumed] -> done
// The receiving of a push is the same thing, whose source the pusher has described.
#pragma once

#include <optional>

#include "link.hpp"

namespace kvferry {

// Where a pull writes: a cache of this node, or (a push by addresses) places in several.
struct Destination {
  std::vector<std::shared_ptr<Cache>> caches;  // kept alive; guards and kinds are theirs
  std::optional<Geometry> composed;            // by addresses
  std::vector<Guard> guards;
  KindId kind = host_kind;

  const Geometry& geometry() const noexcept { return composed ? *composed : caches.front()->geometry; }
};

struct PullAsk {
  Target target;
  Destination destination;
  std::shared_ptr<const Moves> moves;
  unsigned transports = 7;
  std::shared_ptr<const Source> source;  // known already (prepared, pushed); else resolved
  std::shared_ptr<const Source> told;    // by its owner, on another way: spares asking where its segments are mapped already
  bool mover_owns_destination = true;
  bool keep = true;                      // the resolution may be kept on the link
  bool resolve_only = false;             // to prepare: nothing is copied
  bool describe_only = false;            // to describe: there is no destination
  std::shared_ptr<ValueSums> sums;      // of what is written, by a one-sided copy into host memory
  bool touched_before = false;           // something that was tried may have written to the destination already
};

class Pull : public Operation {
 public:
  Pull(Engine& engine, std::shared_ptr<Link> link, Deadline deadline, PullAsk ask, const char* verb = "pull");
  void help() override;
  std::string subject() const override;
  const std::shared_ptr<const Source>& source() const noexcept { return source_; }
  const std::shared_ptr<const Plan>& plan() const noexcept { return plan_; }
  const ValueSums* sums() const noexcept { return ask_.sums.get(); }
  const std::shared_ptr<const Moves>& moves() const noexcept { return ask_.moves; }
  // Whether it will run to its end on this thread without an answer from anybody and copies at most that much: then
  // its caller need not step aside for others meanwhile. To be asked before it runs.
  bool will_not_wait(std::uint64_t bytes);
  // All of it at once, on this thread, if it will not wait and is small: for one that nobody shares. False: it is none of
  // these, or something was in its way, and another pull has to say what.
  bool run_at_once();
  // The same of one that has ended and knows source, plan and transport, once more, also while other threads do so. Nothing: it is
  // none of these, or something was in its way; `touched`: bytes of the destination may have changed.
  std::optional<Result> run_again_at_once(const Deadline& deadline, bool& touched) noexcept;
  // What it was asked for, for the pull that is made then.
  PullAsk ask_again_for() {
    ask_.touched_before = touched_;
    return std::move(ask_);
  }
  void use_plan(std::shared_ptr<const Plan> plan) { plan_ = std::move(plan); }  // before it runs

 protected:
  Need step() override;
  void ended() noexcept override;
  bool may_be_held() override;
  void given_up() noexcept override;
  void let_go() noexcept override;

 private:
  enum class Phase { begin, send, await_geometry, await_segment, plan, copy, ask, stream, confirm, await_consumed };

  unsigned one_sided() const noexcept;
  bool small_enough() const noexcept;  // to be copied at once
  bool copy_small(bool& touched, ValueSums* sums) noexcept;
  void begin_request(wire::Writer request, Phase then);
  bool may_be_answered() const noexcept;        // by all that it has asked for
  bool await_answer(Frame& frame, Need& need);  // one frame on the lane
  void ask_again(bool harmless, Need& need);
  bool next_missing_segment();
  void do_without_map();  // this time
  bool has_segments(const Source& source) const;
  void resolved(Frame& frame);
  void make_plan_now();
  void choose_transport();
  bool copy_one_sided();  // false: go on by another transport
  void work() noexcept;
  Outcome copy_piece(PlanCursor piece, std::uint64_t bytes, ValueSums::Part* sums = nullptr) noexcept;
  Outcome copy_summed(PlanCursor piece, std::uint64_t bytes, std::size_t first_value) noexcept;
  void add_to(ValueSums::Part& sums, PlanCursor piece, std::uint64_t bytes) const noexcept;
  bool can_be_summed() const noexcept;
  Outcome copy_by_map(PlanCursor piece, std::uint64_t bytes) noexcept;
  Outcome copy_by_cma(PlanCursor piece, std::uint64_t bytes) noexcept;
  bool source_stands() const noexcept;
  void ask_for_stream();
  Need stream();
  long receive(std::span<std::uint8_t> into);
  long refill();
  bool take_payload(Need& need);
  bool receive_payload(Need& need);
  void after_copy();
  void ask_to_resolve(Phase then, bool to_describe);
  Outcome gone() const;
  Outcome destination_gone() const;
  Outcome destination_not_there() const;
  bool destination_may_shrink() const noexcept;

  PullAsk ask_;
  std::shared_ptr<const Source> source_;
  std::shared_ptr<const Plan> plan_;
  SourceSelect select_;
  bool have_select_ = false;
  bool was_kept_ = false;  // source_ is what the link keeps
  Transport transport_ = Transport::none;
  Phase phase_ = Phase::begin, after_send_ = Phase::begin;
  bool small_ = true;

  // the conversation on the lane
  std::optional<FrameBuffer> in_;
  std::uint32_t wanted_segment_ = 0;

  // the stream
  wire::Header header_{};
  std::size_t header_have_ = 0;
  std::uint64_t piece_left_ = 0;
  std::vector<std::uint8_t> tail_;
  std::size_t tail_have_ = 0;
  std::optional<PlanCursor> cursor_;
  std::vector<std::uint8_t> staging_;
  std::vector<std::uint8_t> reply_;  // of a small stream, read in one piece; empty for others
  std::size_t reply_have_ = 0, reply_taken_ = 0;

  // the one-sided copy, shared with helpers
  std::mutex pieces_mutex_;
  std::uint64_t piece_bytes_ = 0;
  bool summing_ = false;        // pieces are of whole values then
  std::size_t next_value_ = 0;
  bool pieces_open_ = false;
  std::atomic<int> inside_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> any_bytes_{false};
  Outcome failure_;
  std::atomic<bool> fall_back_{false};
};

// A pull with everything resolved and planned that can be: run it again and again, from any thread.
class PreparedPull {
 public:
  PreparedPull(Engine& engine, std::shared_ptr<Link> link, PullAsk ask, Deadline deadline);  // resolves; throws Error
  Result run_here(const Deadline& deadline);  // the next run of it, on this thread, to its end
  // The two halves of that, for who does something in between. The first is for a small one that needs no answer from anybody, and
  // goes without what an operation takes that others may wait for, cancel or hear of. Nothing: the second has to do it, or to say
  // what is wrong.
  std::optional<Result> run_at_once(const Deadline& deadline, bool& touched);
  std::shared_ptr<Pull> operation(Deadline deadline, bool touched = false);

 private:
  void resolve(Deadline deadline);
  Engine& engine_;
  std::shared_ptr<Link> link_;
  PullAsk ask_;  // as it was given
  std::mutex mutex_;
  std::shared_ptr<Pull> resolved_;  // has what was found out: source, plan and transport
};

// The local cache as a destination. Throws Error(not_found).
Destination destination_cache(Engine& engine, std::uint64_t cache_id);
// This process's own memory, where the spans of `moves` say. Throws Error(invalid_argument) for moves of another form.
Destination destination_memory(const std::shared_ptr<const Moves>& moves);

}  // namespace kvferry
