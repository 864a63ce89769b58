#include "node.hpp"

#include <algorithm>
#include <cstring>

#include "inner.hpp"
#include "interrupt.hpp"
#include "sentence.hpp"

namespace kvferry {

const Result& checked(const Operation& operation, const Result& result) {
  if (!result.outcome.ok()) throw Error(result.outcome, operation.link()->label(), operation.subject(), operation.verb());
  return result;
}

Node::Node(NodeOptions options) : generation_(process_generation()) {
  watch_forks();
  if (options.lanes == 0 || options.lanes > 16) throw Error(Kind::invalid_argument, "a link has 1 to 16 lanes");
  if (options.program.size() > longest_program) throw Error(Kind::invalid_argument, sentence("program has ", options.program.size(), " bytes: ", longest_program, " are allowed"));
  if (options.heartbeat_ms <= 0 || options.heartbeat_timeout_ms < options.heartbeat_ms)
    throw Error(Kind::invalid_argument, "heartbeat_timeout_ms must be at least heartbeat_ms, and both positive");
  if ((options.transports & 7u) == 0) throw Error(Kind::invalid_argument, "a node needs at least one transport");
  inner_ = std::make_unique<NodeInner>(std::move(options));
  inner_->engine.crew.start();
  inner_->engine.reactor.start();
}

Node::~Node() {
  try {
    close();
  } catch (const Error&) {  // a thread is still inside; it needs what it runs on
    [[maybe_unused]] auto* leaked = inner_.release();
    return;
  }
  if (generation_ != process_generation()) {
    // A forked child: the threads do not exist here and any lock may be held by one of them. Let it all be.
    inner_->engine.reactor.abandon();
    inner_->engine.crew.abandon();
    [[maybe_unused]] auto* leaked = inner_.release();
  }
}

std::uint64_t Node::id() const noexcept { return inner_->engine.options.node_id; }

bool Node::closed() const noexcept { return generation_ != process_generation() || inner_->closed.load(); }

namespace {
void end_all(NodeInner& node) {
  stop_listening(node);
  for (const auto& link : node.links()) {
    node.take_down(link, {Kind::closed, "this node was closed", false, true});
    link->wait_until_quiet(Deadline::after_ms(60'000));  // pieces in hand
  }
  node.calls.close();
  node.engine.reactor.stop();
  node.engine.crew.stop();
  node.engine.log.close();
  node.unix_listener.reset();
  node.retired_listeners.clear();
}
}  // namespace

void Node::close() {
  if (generation_ != process_generation()) return;
  auto& node = *inner_;
  const std::lock_guard one_at_a_time(node.closing);
  if (!node.closed.exchange(true)) end_all(node);
  node.engine.registry.close();
  if (node.engine.memory_held.load() > 0)
    throw Error({Kind::busy, "the kernel holds a copy in memory of this process that was moved by spans, which waits for the file or device behind it: "
                             "the memory must stay as it is; close the node again to hear when it is free", true, false}, "", "MEMORY", "");
  node.engine.crew.wait_for_apart(Deadline::after_ms(60'000));  // they are inside nothing any more
}

Engine& Node::engine() {
  check_not_forked(generation_);
  if (inner_->closed.load()) throw Error(Kind::closed, "this node is closed");
  return inner_->engine;
}

Registry& Node::registry() { return engine().registry; }

Endpoint Node::listen(const std::string& host, std::uint16_t port) {
  engine();
  return start_listening(*inner_, {host, port, false, {}});
}

Endpoint Node::listen_unix(const std::string& path) {
  engine();
  return start_listening(*inner_, {{}, 0, true, path});
}

void Node::stop_listening() {
  engine();
  kvferry::stop_listening(*inner_);
}

std::shared_ptr<Link> Node::connect(const std::string& host, std::uint16_t port, Deadline deadline, bool replace) {
  engine();
  return dial_link(*inner_, {host, port, false, {}}, deadline, replace);
}

std::shared_ptr<Link> Node::connect_unix(const std::string& path, Deadline deadline, bool replace) {
  engine();
  return dial_link(*inner_, {{}, 0, true, path}, deadline, replace);
}

std::vector<std::shared_ptr<Link>> Node::links() const { return closed() ? std::vector<std::shared_ptr<Link>>{} : inner_->links(); }

void Node::unlink(const std::shared_ptr<Link>& link, Deadline deadline, bool force) {
  if (closed() || !link->alive()) return;
  std::optional<Link::Parting> parting;
  if (!force) {
    parting.emplace(*link);
    if (!link->wait_until_quiet(deadline))
      throw Error({Kind::deadline, sentence(link->operations(), " operations are still in flight; wait for them, or unlink by force"), false, true},
                  link->label(), "", "unlink");
    const auto control = inner_->control_of(*link);
    if (control && !control->ask_to_unlink(deadline) && link->alive())
      throw Error({Kind::deadline, "the peer did not confirm in time: the link stays; unlink by force to drop this side alone", false, true},
                  link->label(), "", "unlink");
  }
  inner_->take_down(link, {Kind::not_linked, "this link was unlinked", false, true});
  link->wait_until_quiet(Deadline::after_ms(60'000));
}

std::optional<std::pair<std::string, std::string>> Node::next_event(std::int64_t timeout_ms) {
  if (generation_ != process_generation()) return std::nullopt;
  return inner_->engine.log.take(timeout_ms);
}

namespace {

void check_names(const Target& target, bool pushing) {
  if (target.name.size() > longest_name) throw Error(Kind::invalid_argument, sentence("a name of ", target.name.size(), " bytes: ", longest_name, " are allowed"));
  if (target.by == Target::By::addresses && !pushing) throw Error(Kind::invalid_argument, "a pull cannot name raw addresses: name the cache, its id, or a key");
}

PullAsk pull_ask(Engine& engine, Target target, std::optional<std::uint64_t> into, std::shared_ptr<const Moves> moves, unsigned transports) {
  PullAsk ask;
  ask.target = std::move(target);
  ask.destination = into ? destination_cache(engine, *into) : destination_memory(moves);
  ask.moves = std::move(moves);
  ask.transports = transports;
  return ask;
}

}  // namespace

std::shared_ptr<Pull> Node::pull(const std::shared_ptr<Link>& link, Target target, std::optional<std::uint64_t> into, std::shared_ptr<const Moves> moves,
                                 Deadline deadline, unsigned transports, std::string_view resolution) {
  auto& e = engine();
  check_names(target, false);
  std::shared_ptr<const Source> told;
  if (!resolution.empty()) {
    try {
      wire::Reader in({reinterpret_cast<const std::uint8_t*>(resolution.data()), resolution.size()});
      told = get_resolved(in, target);
    } catch (const wire::WireError& error) {
      throw Error(Kind::invalid_argument, sentence("this resolution is not one: ", error.what()));
    }
  }
  auto ask = pull_ask(e, std::move(target), into, std::move(moves), transports);
  ask.sums = ask.moves->sums;
  ask.keep = told == nullptr;
  ask.told = std::move(told);
  return std::make_shared<Pull>(e, link, deadline, std::move(ask));
}

void Node::pull_now(const std::shared_ptr<Link>& link, Target target, std::uint64_t into, std::shared_ptr<const Moves> moves, Deadline deadline,
                    unsigned transports) {
  auto& e = engine();
  check_names(target, false);
  auto ask = pull_ask(e, std::move(target), into, std::move(moves), transports);
  ask.sums = ask.moves->sums;
  Pull at_once(e, link, deadline, std::move(ask));
  if (at_once.run_at_once()) return;
  const auto operation = std::make_shared<Pull>(e, link, deadline, at_once.ask_again_for());
  checked(*operation, operation->run_here());
}

std::string Node::resolution(const std::string& window) {
  Target target;
  target.by = Target::By::window;
  target.name = window;
  wire::Writer out(wire::Type::geometry, 0);
  put_resolved(out, engine().registry.resolve(target, Access::read));
  const auto body = out.body();
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

namespace {
PushAsk push_ask(Engine& engine, std::optional<std::uint64_t> source, Target target, std::shared_ptr<const Moves> moves, unsigned transports) {
  PushAsk ask;
  ask.source = source ? engine.registry.find(*source) : memory_of_process(moves);
  if (!ask.source) throw Error(Kind::not_found, sentence("this node has no cache ", *source));
  ask.target = std::move(target);
  ask.moves = std::move(moves);
  ask.transports = transports;
  return ask;
}
}  // namespace

std::shared_ptr<Push> Node::push(const std::shared_ptr<Link>& link, std::optional<std::uint64_t> source, Target target, std::shared_ptr<const Moves> moves,
                                 Deadline deadline, unsigned transports) {
  auto& e = engine();
  return std::make_shared<Push>(e, link, deadline, push_ask(e, source, std::move(target), std::move(moves), transports));
}

std::shared_ptr<LayerPush> Node::push_layers(const std::shared_ptr<Link>& link, std::uint64_t source, Target target,
                                             std::shared_ptr<const Moves> moves, std::vector<std::uint32_t> layers,
                                             std::vector<std::uint32_t> destination_layers, std::uint32_t tensors_per_layer,
                                             std::int64_t timeout_ms, unsigned transports) {
  auto& e = engine();
  return std::make_shared<LayerPush>(e, link, push_ask(e, source, std::move(target), std::move(moves), transports), std::move(layers),
                                     std::move(destination_layers), tensors_per_layer, timeout_ms);
}

std::shared_ptr<PreparedPull> Node::prepare(const std::shared_ptr<Link>& link, Target target, std::uint64_t into,
                                            std::shared_ptr<const Moves> moves, Deadline deadline, unsigned transports) {
  auto& e = engine();
  check_names(target, false);
  return std::make_shared<PreparedPull>(e, link, pull_ask(e, std::move(target), into, std::move(moves), transports), deadline);
}

std::shared_ptr<Ask> Node::ask(const std::shared_ptr<Link>& link, std::span<const std::uint8_t> message, Deadline deadline) {
  return std::make_shared<Ask>(engine(), link, deadline, message, false);
}

std::shared_ptr<Ask> Node::ask(const std::shared_ptr<Link>& link, Payload message, Deadline deadline, bool one_way) {
  return std::make_shared<Ask>(engine(), link, deadline, std::move(message), one_way);
}

void Node::serve_calls() {
  engine();
  inner_->calls.serve();
}

CallEvent Node::next_call(const Deadline& until) {
  engine();
  return inner_->calls.next(until);
}

std::pair<std::shared_ptr<const Source>, Transport> Node::describe(const std::shared_ptr<Link>& link, Target target, Deadline deadline) {
  auto& e = engine();
  check_names(target, false);
  PullAsk ask;
  ask.target = std::move(target);
  ask.keep = false;
  ask.describe_only = true;
  const auto operation = std::make_shared<Pull>(e, link, deadline, std::move(ask), "describe");
  checked(*operation, operation->run_here());
  return {operation->source(), operation->result().transport};
}

namespace {

std::shared_ptr<Cache> local_cache(Engine& engine, const Target& target) {
  if (target.by != Target::By::id) return nullptr;
  auto cache = engine.registry.find(target.id);
  if (!cache) throw Error(Kind::not_found, sentence("this node has no cache ", target.id));
  return cache;
}

// Memory by addresses, shaped as the other side needs it: units of its size unless the target says otherwise.
std::shared_ptr<Cache> bare_cache(const Target& target, const Geometry& other, std::uint64_t units) {
  auto cache = std::make_shared<Cache>();
  cache->geometry = target.composed(other, units);
  return cache;
}

Plan plan_with_offset(const Geometry& from, const Geometry& to, const Moves& moves, std::uint64_t offset) {
  if (offset == 0) return make_plan(from, to, moves, -1, true);
  if (moves.form != Moves::Form::row) throw Error(Kind::invalid_argument, sentence("offset ", offset, " is into a row, and no row is moved"));
  const auto most = std::min(from.unit_bytes, to.unit_bytes);
  if (offset >= most) throw Error(Kind::invalid_argument, sentence("offset ", offset, " lies outside rows of ", from.unit_bytes, " and ", to.unit_bytes, " bytes"));
  Moves shorter = moves;
  if (shorter.size_bytes < 0) shorter.size_bytes = static_cast<std::int64_t>(to.unit_bytes - offset);
  if (static_cast<std::uint64_t>(shorter.size_bytes) > most - offset)
    throw Error(Kind::invalid_argument, sentence(shorter.size_bytes, " bytes from offset ", offset, " do not fit in rows of ", from.unit_bytes, " and ", to.unit_bytes, " bytes"));
  auto plan = make_plan(from, to, shorter, -1, true);
  for (auto& run : plan.runs) run.source += offset, run.destination += offset;
  return plan;
}

}  // namespace

Result Node::copy(std::uint64_t source, std::uint64_t destination, const Moves& moves) {
  Target from, to;
  from.id = source;
  to.id = destination;
  return copy(from, to, moves);
}

Result Node::copy(const Target& source, const Target& destination, const Moves& moves, std::uint64_t offset_bytes) {
  auto& e = engine();
  const auto started = now_ns();
  const bool bare_source = source.by == Target::By::addresses, bare_destination = destination.by == Target::By::addresses;
  if ((source.by != Target::By::id && !bare_source) || (destination.by != Target::By::id && !bare_destination) || (bare_source && bare_destination))
    throw Error(Kind::invalid_argument, "a copy within this node is between its caches, by id, or one of them and addresses");
  auto from = local_cache(e, source), to = local_cache(e, destination);
  if (bare_source) from = bare_cache(source, to->geometry, moves.form == Moves::Form::whole ? to->geometry.count : moves.source_end);
  if (bare_destination) to = bare_cache(destination, from->geometry, moves.form == Moves::Form::whole ? from->geometry.count : moves.destination_end);
  const auto plan = plan_with_offset(from->geometry, to->geometry, moves, offset_bytes);
  e.check_readable(*from);
  e.check_writable(*to);
  const bool within = from == to;
  if (within && moves.form == Moves::Form::spans) throw Error(Kind::invalid_argument, "spans are copied between two caches, not within one");
  const bool may_shrink = from->may_shrink.load() || to->may_shrink.load();
  const auto copy_plainly = [&](void* out, const void* in, std::size_t bytes) {
    if (may_shrink) return copy_bytes_by_kernel(out, in, bytes);
    if (within)
      std::memmove(out, in, bytes);
    else
      copy_bytes(out, in, bytes, plan.total() >= stream_from_bytes);
    return true;
  };
  std::vector<Guard> guards;
  if (!bare_source) guards.push_back(from->guard);
  if (!within && !bare_destination) guards.push_back(to->guard);
  Copier* const reader = copier_of(from->kind);
  Copier* const writer = copier_of(to->kind);
  PlanCursor cursor(plan);
  std::vector<std::byte> staging;
  bool touched = false;
  while (!cursor.done()) {
    if (Interruptible::asked_now_and_then()) throw Error({Kind::cancelled, "copy was interrupted", touched, true}, "", to->geometry.label(), "copy");
    const Entered entered(e.guards, guards);
    if (!entered) throw Error({Kind::not_found, "a cache was unregistered while it was being copied", touched, true}, "", to->geometry.label(), "copy");
    touched = true;
    for (std::uint64_t piece = 0; piece < piece_bytes && !cursor.done();) {
      const auto span = cursor.next(within ? from->geometry.unit_bytes : piece_bytes - piece);
      const auto a = from->geometry.tensors[plan.source_first + span.tensor].address + span.source;
      const auto b = to->geometry.tensors[plan.destination_first + span.tensor].address + span.destination;
      bool ok;
      if (reader == nullptr && writer == nullptr) {
        ok = copy_plainly(reinterpret_cast<void*>(b), reinterpret_cast<const void*>(a), span.bytes);
      } else {
        staging.resize(span.bytes);
        ok = (reader != nullptr ? reader->read(staging.data(), a, span.bytes)
                                : copy_plainly(staging.data(), reinterpret_cast<const void*>(a), span.bytes)) &&
             (writer != nullptr ? writer->write(b, staging.data(), span.bytes)
                                : copy_plainly(reinterpret_cast<void*>(b), staging.data(), span.bytes));
      }
      if (!ok)
        throw Error({Kind::invalid_argument,
                     sentence("memory of ", from->geometry.label(), " or of ", to->geometry.label(), " is not there, or not of its kind (a file or memfd that has become shorter?)"),
                     true, true},
                    "", to->geometry.label(), "copy");
      piece += span.bytes;
    }
  }
  return {{}, plan.total(), now_ns() - started, Transport::local};
}

LinkStatistics Node::statistics(const Link& link) const {
  LinkStatistics s;
  const auto [map, cma] = link.reasons();
  const auto allowed = inner_->engine.options.transports;
  s.peer = link.label();
  s.address = link.peer.endpoint.text();
  s.map = map.empty() ? "ok" : map;
  s.cma = cma.empty() ? "ok" : cma;
  s.socket = (allowed & static_cast<unsigned>(Transport::socket)) != 0 ? "ok" : "not among this node's transports";
  s.peer_id = link.peer.node_id;
  s.pulls = link.pulls.load();
  s.pushes = link.pushes.load();
  s.bytes_pulled = link.bytes_pulled.load();
  s.bytes_pushed = link.bytes_pushed.load();
  s.failures = link.failures.load();
  s.resets = link.lanes.resets();
  s.alive = link.alive();
  s.outgoing = link.outgoing;
  s.same_host = link.peer.same_host;
  s.lanes = link.lanes.open_lanes();
  s.operations = link.operations();
  return s;
}

NodeStatistics Node::statistics() const {
  NodeStatistics s;
  s.node_id = id();
  if (closed()) return s;
  auto& e = inner_->engine;
  s.threads = inner_->threads;
  s.caches = e.registry.cache_ids().size();
  s.windows = e.registry.window_count();
  s.links = inner_->links().size();
  s.slots_open = e.guards.open_count();
  if (const auto* pool = e.registry.pool()) {
    s.pool_bytes = pool->size_bytes();
    s.pool_used_bytes = pool->used_bytes();
  }
  return s;
}

}  // namespace kvferry
