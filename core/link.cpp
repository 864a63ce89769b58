#include "link.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "interrupt.hpp"
#include "serve.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvferry {

// ---- LanePool

bool LanePool::fits(const Lane& lane, LaneUse use) const noexcept {
  if (lane.use >= LaneUse::push || use >= LaneUse::push) return lane.use == use;
  // A big operation takes a small lane only where there is no other.
  return use == LaneUse::small || lane.use != LaneUse::small || for_pulls() == 1;
}

void LanePool::add(std::unique_ptr<Lane> lane) {
  std::vector<std::shared_ptr<Operation>> to_schedule;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    note_open(*lane);
    hand_out(std::move(lane), to_schedule);
  }
  for (auto& operation : to_schedule) operation->schedule();
}

// Precondition: locked. To the first waiter it fits, else idle.
void LanePool::hand_out(std::unique_ptr<Lane> lane, std::vector<std::shared_ptr<Operation>>& to_schedule) {
  for (auto it = waiters_.begin(); it != waiters_.end(); ++it) {
    if (!fits(*lane, it->use)) continue;
    it->operation->granted_ = std::move(lane);
    it->operation->waits_for_lane_ = false;
    to_schedule.push_back(std::move(it->operation));
    waiters_.erase(it);
    return;
  }
  idle_.push_back(std::move(lane));
}

std::unique_ptr<Lane> LanePool::take(LaneUse use, Operation& operation) {
  std::unique_lock lock(mutex_);
  if (operation.granted_) return std::move(operation.granted_);
  if (closed_) return nullptr;  // the operation sees that the link is down
  open_missing(lock, use);
  auto best = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it) {
    if (!fits(**it, use)) continue;
    best = it;
    if ((*it)->use == use) break;
  }
  if (best != idle_.end()) {
    auto lane = std::move(*best);
    idle_.erase(best);
    leave_queue(operation);  // it may have been waiting when a lane was dialled for it just now
    return lane;
  }
  if (operation.waits_for_lane_) return nullptr;
  waiters_.push_back({operation.shared_from_this(), use});
  operation.waits_for_lane_ = true;
  return nullptr;
}

// Precondition: locked.
bool LanePool::wanted(LaneUse use) const noexcept {
  if (use == LaneUse::push) return !push_open_;
  if (use != LaneUse::call) return for_pulls() < lanes_;
  const auto idle = [](const std::unique_ptr<Lane>& lane) { return lane->use == LaneUse::call; };
  return calls_open_ < lanes_ && std::none_of(idle_.begin(), idle_.end(), idle);
}

// Precondition: locked. Those that this kind of operation may use.
void LanePool::open_missing(std::unique_lock<std::mutex>&, LaneUse use) {
  while (dial_ && wanted(use)) {
    auto lane = dial_(use >= LaneUse::push ? use : small_open_ ? LaneUse::bulk : LaneUse::small);
    dial_failed_ = !lane;
    if (!lane) return;  // the next operation tries again, or one that waits
    note_open(*lane);
    idle_.push_back(std::move(lane));
  }
}

void LanePool::note_open(const Lane& lane) {
  open_.insert(lane.descriptor.get());
  small_open_ |= lane.use == LaneUse::small;
  push_open_ |= lane.use == LaneUse::push;
  calls_open_ += lane.use == LaneUse::call;
}

bool LanePool::note_closed(const Lane& lane) {
  if (open_.erase(lane.descriptor.get()) == 0) return false;
  if (lane.use == LaneUse::small) small_open_ = false;
  if (lane.use == LaneUse::push) push_open_ = false;
  if (lane.use == LaneUse::call) --calls_open_;
  return true;
}

void LanePool::give(std::unique_ptr<Lane> lane) {
  std::vector<std::shared_ptr<Operation>> to_schedule;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) {
      note_closed(*lane);
      return;
    }
    hand_out(std::move(lane), to_schedule);
  }
  for (auto& operation : to_schedule) operation->schedule();
}

void LanePool::lost(std::unique_ptr<Lane> lane) {
  const auto& broken = *lane;
  replace(broken, std::move(lane));
}

void LanePool::forget(const Lane& lane) { replace(lane, nullptr); }

void LanePool::replace(const Lane& lane, std::unique_ptr<Lane> to_close) {
  std::vector<std::shared_ptr<Operation>> to_schedule;
  {
    std::unique_lock lock(mutex_);
    const auto use = lane.use;
    if (!note_closed(lane)) return;  // forgotten before
    resets_.fetch_add(1, std::memory_order_relaxed);
    to_close.reset();  // its descriptor may be the last one to be had
    if (closed_) return;
    // What took this one may have taken others that lie idle.
    std::erase_if(idle_, [this](const std::unique_ptr<Lane>& one) {
      const bool gone = closed_by_peer(one->descriptor.get());
      if (gone) note_closed(*one);
      return gone;
    });
    open_missing(lock, use);
    auto idle = std::move(idle_);
    idle_.clear();
    for (auto& one : idle) hand_out(std::move(one), to_schedule);
  }
  for (auto& operation : to_schedule) operation->schedule();
}

// Precondition: locked. Thousands may be waiting: nobody who does not is looked for among them.
void LanePool::leave_queue(Operation& operation) {
  if (!std::exchange(operation.waits_for_lane_, false)) return;
  std::erase_if(waiters_, [&](const Waiter& waiter) { return waiter.operation.get() == &operation; });
}

void LanePool::leave(Operation& operation) {
  std::unique_ptr<Lane> granted;
  {
    const std::lock_guard lock(mutex_);
    leave_queue(operation);
    granted = std::move(operation.granted_);
  }
  if (granted) give(std::move(granted));
}

void LanePool::close() {
  std::deque<Waiter> waiters;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const int fd : open_) ::shutdown(fd, SHUT_RDWR);  // whoever waits on one wakes up
    for (const auto& lane : idle_) note_closed(*lane);
    idle_.clear();
    waiters.swap(waiters_);
  }
  for (auto& waiter : waiters) waiter.operation->schedule();
}

bool LanePool::missing_some() const {
  const std::lock_guard lock(mutex_);
  return dial_failed_;
}

unsigned LanePool::open_lanes() const {
  const std::lock_guard lock(mutex_);
  return for_pulls();
}

// ---- PeerSegment

PeerSegment::PeerSegment(Descriptor fd) : fd_(std::move(fd)) {
  struct stat st{};
  const int seals = ::fcntl(fd_.get(), F_GET_SEALS);
  if (::fstat(fd_.get(), &st) != 0 || st.st_size <= 0 || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw Error(Kind::refused, "the peer offered a segment that is not a sealed memfd");
  bytes_ = static_cast<std::size_t>(st.st_size);
  void* data = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (data == MAP_FAILED)
    throw Error(Kind::out_of_memory, std::string("a segment of the peer cannot be mapped: ") + std::strerror(errno));
  data_ = static_cast<const std::byte*>(data);
  present_ = std::make_unique<std::atomic<std::uint8_t>[]>((bytes_ >> chunk_shift) + 1);
}

PeerSegment::~PeerSegment() { ::munmap(const_cast<std::byte*>(data_), bytes_); }

bool PeerSegment::chunk_present(std::uint64_t chunk) {
  auto& known = present_[chunk];
  if (known.load(std::memory_order_relaxed) != 0) return true;
  const auto begin = chunk << chunk_shift;
  const auto end = std::min<std::uint64_t>(bytes_, begin + (std::uint64_t{1} << chunk_shift));
  const off_t hole = ::lseek(fd_.get(), static_cast<off_t>(begin), SEEK_HOLE);
  if (hole < 0 || static_cast<std::uint64_t>(hole) < end) return false;
  note_present(begin, static_cast<std::uint64_t>(hole));
  return true;
}

// Pages of a live segment never go away again. The kernel walks the whole way to the next hole, so all of it is noted.
void PeerSegment::note_present(std::uint64_t begin, std::uint64_t end) {
  const auto behind = end >= bytes_ ? ((bytes_ - 1) >> chunk_shift) + 1 : end >> chunk_shift;  // first chunk not whole
  for (auto chunk = (begin + (std::uint64_t{1} << chunk_shift) - 1) >> chunk_shift; chunk < behind; ++chunk)
    present_[chunk].store(1, std::memory_order_relaxed);
}

bool PeerSegment::present(std::uint64_t offset, std::uint64_t bytes) {
  for (auto chunk = offset >> chunk_shift; chunk <= (offset + bytes - 1) >> chunk_shift; ++chunk)
    if (!chunk_present(chunk)) return false;
  return true;
}

PeerSegment::Copied PeerSegment::read_into(void* to, std::uint64_t offset, std::uint64_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const ssize_t n = ::pread(fd_.get(), out, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 && errno == EFAULT ? Copied::not_there : Copied::outside;
    out += n;
    offset += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::uint64_t>(n);
  }
  return Copied::all;
}

PeerSegment::Copied PeerSegment::copy(void* to, std::uint64_t offset, std::uint64_t bytes, bool stream, bool by_kernel) {
  if (offset > bytes_ || bytes > bytes_ - offset) return Copied::outside;
  if (bytes == 0) return Copied::all;
  if (by_kernel || !present(offset, bytes)) return read_into(to, offset, bytes);
  copy_bytes(to, data_ + offset, bytes, stream);
  return Copied::all;
}

bool PeerSegment::populate_some(Populated& progress) {
  constexpr std::uint64_t stretch = 8 << 20;
  if (progress.from >= progress.hole) {
    if (progress.from >= bytes_) return false;
    const off_t data = ::lseek(fd_.get(), static_cast<off_t>(progress.from), SEEK_DATA);
    if (data < 0) return false;  // holes up to the end
    const off_t hole = ::lseek(fd_.get(), data, SEEK_HOLE);
    if (hole < 0) return false;
    progress = {static_cast<std::uint64_t>(data), std::min(static_cast<std::uint64_t>(hole), std::uint64_t{bytes_})};
    note_present(progress.from, progress.hole);
  }
  const auto end = std::min(progress.hole, progress.from + stretch);
  // Best effort: a fault does it too.
  ::madvise(const_cast<std::byte*>(data_) + progress.from, end - progress.from, MADV_POPULATE_READ);
  progress.from = end;
  return end < bytes_;
}

// ---- Link

std::size_t TargetHash::operator()(const Target& target) const noexcept {
  std::size_t h = std::hash<std::string>{}(target.name);
  h = h * 0x9E3779B97F4A7C15ULL + target.id;
  h = h * 0x9E3779B97F4A7C15ULL + target.model;
  return h * 0x9E3779B97F4A7C15ULL + static_cast<std::size_t>(target.by);
}

Link::Link(Engine& engine, std::uint64_t link_id, PeerFacts facts, bool is_outgoing, std::array<std::uint8_t, 16> link_token,
           std::function<std::unique_ptr<Lane>(LaneUse)> dial)
    : id(link_id),
      peer(std::move(facts)),
      outgoing(is_outgoing),
      token(link_token),
      lanes(engine.options.lanes, std::move(dial)),
      last_heard_ns(now_ns()),
      engine_(engine),
      map_ok_(peer.map_ok),
      cma_ok_(peer.cma_ok) {}

std::string Link::label() const { return "node " + std::to_string(peer.node_id) + " at " + peer.endpoint.text(); }

Outcome Link::death() const {
  const std::lock_guard lock(mutex_);
  return death_;
}

bool Link::peer_process_ended() const noexcept {
  if (!peer.pidfd) return false;
  pollfd p{peer.pidfd.get(), POLLIN, 0};
  return ::poll(&p, 1, 0) > 0;
}

unsigned Link::transports(unsigned wanted) const noexcept {
  unsigned usable = static_cast<unsigned>(Transport::socket);
  if (map_ok_.load(std::memory_order_relaxed)) usable |= static_cast<unsigned>(Transport::map);
  if (cma_ok_.load(std::memory_order_relaxed)) usable |= static_cast<unsigned>(Transport::cma);
  return usable & wanted & engine_.options.transports;
}

void Link::give_up_cma(std::string reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!cma_ok_.exchange(false)) return;
    peer.cma_reason = reason;
  }
  engine_.log.add("warning", "link to " + label() + " goes on without cma: " + reason);
}

void Link::give_up_map(std::string reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!map_ok_.exchange(false)) return;
    peer.map_reason = reason;
  }
  engine_.log.add("warning", "link to " + label() + " goes on without map: " + reason);
}

std::pair<std::string, std::string> Link::reasons() const {
  const std::lock_guard lock(mutex_);
  return {map_ok_ ? "" : peer.map_reason, cma_ok_ ? "" : peer.cma_reason};
}

std::shared_ptr<PeerSegment> Link::segment(std::uint32_t segment_id) const {
  const std::lock_guard lock(mutex_);
  const auto it = segments_.find(segment_id);
  return it == segments_.end() ? nullptr : it->second;
}

std::shared_ptr<PeerSegment> Link::add_segment(std::uint32_t segment_id, Descriptor fd) {
  if (auto known = segment(segment_id)) return known;
  auto made = std::make_shared<PeerSegment>(std::move(fd));
  {
    const std::lock_guard lock(mutex_);
    if (gone_.contains(segment_id) || !alive()) return made;
    const auto [it, fresh] = segments_.emplace(segment_id, made);
    if (!fresh) return it->second;
  }
  // Its mapping is populated in the background, a stretch at a time so that other work goes first.
  struct Populate {
    Engine& engine;
    std::weak_ptr<PeerSegment> segment;
    PeerSegment::Populated progress{};
    void operator()() {
      const auto alive = segment.lock();
      if (alive && alive->populate_some(progress)) engine.crew.submit_background(*this);
    }
  };
  engine_.crew.submit_background(Populate{engine_, made});
  return made;
}

bool Link::take_segment(std::uint32_t segment_id, Descriptor fd) {
  try {
    add_segment(segment_id, std::move(fd));
    return true;
  } catch (const Error& error) {
    if (error.outcome().kind == Kind::refused) give_up_map(error.what());  // for want of memory it may go another time
    return false;
  }
}

namespace {
// Unmapping and freeing hundreds of MiB takes milliseconds.
void let_go(Engine& engine, std::vector<std::shared_ptr<PeerSegment>> segments) {
  if (!segments.empty()) engine.crew.submit_background([segments = std::move(segments)]() mutable { segments.clear(); });
}
}  // namespace

void Link::forget_segment(std::uint32_t segment_id) {
  std::vector<std::shared_ptr<PeerSegment>> gone;
  {
    const std::lock_guard lock(mutex_);
    constexpr std::size_t most = 1 << 16;
    if (gone_.size() >= most) gone_.clear();
    gone_.insert(segment_id);
    const auto it = segments_.find(segment_id);
    if (it == segments_.end()) return;
    gone.push_back(std::move(it->second));
    segments_.erase(it);
    std::erase_if(kept_, [&](const auto& one) {
      const auto& used = one.second->segments;
      return std::find(used.begin(), used.end(), gone.front()) != used.end();
    });
  }
  let_go(engine_, std::move(gone));
}

std::vector<std::uint32_t> Link::announced() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> ids;
  for (const auto& [id, _] : announced_) ids.push_back(id);
  return ids;
}

void Link::announce(std::uint32_t segment_id) {
  const std::lock_guard lock(mutex_);
  announced_.try_emplace(segment_id, false);
}

bool Link::announce_ahead(std::uint32_t segment_id) {
  const std::lock_guard lock(mutex_);
  return !std::exchange(announced_[segment_id], true);
}

void Link::forget_announcement(std::uint32_t segment_id) {
  const std::lock_guard lock(mutex_);
  announced_.erase(segment_id);
}

void Link::offer(std::uint64_t push, Offer offer) {
  const std::lock_guard lock(mutex_);
  offers_[push] = std::move(offer);
}

void Link::withdraw(std::uint64_t push) noexcept {
  const std::lock_guard lock(mutex_);
  offers_.erase(push);
}

std::optional<Link::Offer> Link::offered(std::uint64_t push) const {
  const std::lock_guard lock(mutex_);
  const auto it = offers_.find(push);
  return it == offers_.end() ? std::nullopt : std::optional(it->second);
}

std::shared_ptr<const Source> Link::kept(const Target& target) {
  const std::lock_guard lock(mutex_);
  const auto it = kept_.find(target);
  if (it == kept_.end()) return nullptr;
  if (!stands(*it->second)) {
    kept_.erase(it);
    return nullptr;
  }
  return it->second;
}

void Link::keep(const Target& target, std::shared_ptr<const Source> source) {
  constexpr std::size_t most = 4096;
  const std::lock_guard lock(mutex_);
  // What has been let go of in the meantime stays let go of: the segments of a link that is down, or of released memory.
  if (!alive()) return;
  for (std::size_t i = 0; i < source->segments.size(); ++i) {
    const auto it = segments_.find(source->geometry.tensors[i].segment);
    if (it == segments_.end() || it->second != source->segments[i]) return;
  }
  if (kept_.size() >= most) kept_.clear();
  kept_[target] = std::move(source);
}

bool Link::stands(const Source& source) const noexcept {
  if (!peer.page) return false;
  for (const auto& guard : source.guards)
    if (!peer.page->alive(guard)) return false;
  return !source.by_epoch || peer.page->epoch() == source.epoch;
}

void Link::begin(const std::shared_ptr<Operation>& operation, bool part_of_another) {
  const std::lock_guard lock(mutex_);  // which wait_until_quiet() takes after the state has changed: it sees this one, or this sees that
  const auto state = state_.load();
  if ((state & down) != 0) throw Error(death_);
  if (state != 0 && !part_of_another) throw Error(Kind::not_linked, "this link is being unlinked");
  operations_.emplace(operation.get(), operation);
}

void Link::end(Operation& operation) noexcept {
  const std::lock_guard lock(mutex_);
  operations_.erase(&operation);
  if (operations_.empty()) quiet_.notify_all();
}

void Link::add_server_lane(const std::shared_ptr<ServerLane>& lane) {
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(server_lanes_, [](const auto& one) { return one.expired(); });
    if (alive()) {
      server_lanes_.push_back(lane);
      return;
    }
  }
  lane->close();
}

bool Link::take_down(Outcome reason) {
  std::vector<std::shared_ptr<Operation>> operations;
  std::vector<std::weak_ptr<ServerLane>> server_lanes;
  std::vector<std::shared_ptr<PeerSegment>> segments;
  {
    const std::lock_guard lock(mutex_);
    if (!alive()) return false;
    death_ = std::move(reason);
    state_.fetch_or(down, std::memory_order_seq_cst);
    for (auto& [_, weak] : operations_)
      if (auto operation = weak.lock()) operations.push_back(std::move(operation));
    server_lanes.swap(server_lanes_);
    kept_.clear();
    for (auto& [_, segment] : segments_) segments.push_back(std::move(segment));
    segments_.clear();
  }
  let_go(engine_, std::move(segments));
  lanes.close();
  for (auto& weak : server_lanes)
    if (const auto lane = weak.lock()) lane->close();
  for (auto& operation : operations) operation->schedule();
  return true;
}

bool Link::wait_until_quiet(const Deadline& until) {
  {
    std::unique_lock lock(mutex_);
    if (!wait_on(quiet_, lock, until, [this] { return operations_.empty(); })) return false;
  }
  while ((state_.load(std::memory_order_seq_cst) & down) != 0 && brief_.load(std::memory_order_seq_cst) != 0) {
    if (until.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return true;
}

std::size_t Link::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_.size();
}

}  // namespace kvferry
