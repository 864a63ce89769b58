// The API: instances come and go, and every call ends as a status and, unless it is a success, one line. What a call means
// stands in instance.cpp.
#include "llm_datadist/llm_datadist.h"

#include <atomic>
#include <cxxabi.h>
#include <new>
#include <shared_mutex>
#include <system_error>

#include "descriptor.hpp"
#include "instance.hpp"
#include "log.hpp"
#include "sentence.hpp"

extern char** environ;

namespace llm_datadist {

using rules::said;

namespace {

Status ended(const char* function, Status status, std::string_view sentence) noexcept {
  log_line(Level::error, function, sentence);
  return status;
}

// Does a call's work: exceptions stop here. `call`: of which sort it is, for rules::status_of.
template <class Work>
Status guarded(const char* function, std::string_view call, Work&& work) {
  try {
    work();
    return LLM_SUCCESS;
  } catch (const Refused& error) {
    return ended(function, error.status, error.what());
  } catch (const rules::RuleError& error) {
    return ended(function, LLM_PARAM_INVALID, error.what());
  } catch (const rules::TooLittleLeft& error) {
    return ended(function, LLM_OUT_OF_MEMORY, error.what());
  } catch (const kvferry::Error& error) {
    // Whatever the call: what Finalize ends is answered as what comes after it.
    return ended(function, error.outcome().kind == kvferry::Kind::closed ? LLM_FAILED : status_of(error, call), sentence_of(error));
  } catch (const std::bad_alloc&) {
    return ended(function, LLM_OUT_OF_MEMORY, "this process has no memory left for what was asked for");
  } catch (const std::length_error&) {
    return ended(function, LLM_OUT_OF_MEMORY, "more was asked for than can be addressed");
  } catch (const std::exception& error) {
    return ended(function, LLM_FAILED, error.what());
  } catch (const abi::__forced_unwind&) {  // a thread is cancelled: it must go on ending
    throw;
  } catch (...) {
    return ended(function, LLM_FAILED, "something was thrown that is no exception");
  }
}

rules::Options plain(const std::map<AscendString, AscendString>& options) {
  rules::Options out;
  for (const auto& [name, value] : options) out[std::string(name.GetString(), name.GetLength())] = std::string(value.GetString(), value.GetLength());
  return out;
}

rules::Options environment() {
  rules::Options out;
  for (char** one = environ; one != nullptr && *one != nullptr; ++one) {
    const std::string_view line = *one;
    const auto equals = line.find('=');
    if (line.starts_with("KVFERRY_") && equals != line.npos) out[std::string(line.substr(0, equals))] = std::string(line.substr(equals + 1));
  }
  return out;
}

std::vector<Cluster> plain(const std::vector<ClusterInfo>& clusters) {
  std::vector<Cluster> out;
  for (const auto& cluster : clusters) {
    Cluster one{cluster.remote_cluster_id, cluster.local_ip_infos.size(), {}};
    for (const auto& info : cluster.local_ip_infos) rules::numeric_host({info.ip.GetString(), info.ip.GetLength()});
    for (const auto& info : cluster.remote_ip_infos) one.remote.emplace_back(rules::numeric_host({info.ip.GetString(), info.ip.GetLength()}), info.port);
    out.push_back(std::move(one));
  }
  return out;
}

// Statuses of several clusters; one line for all that failed.
void summed_up(const std::vector<Cluster>& clusters, const std::vector<rules::Answer>& answers, std::vector<Status>& rets) {
  std::string why;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    rets.push_back(answers[i].status);
    if (!answers[i].ok()) why += said(why.empty() ? "" : "; ", "cluster ", clusters[i].id, ": ", answers[i].why);
  }
  const auto status = rules::overall(rets);
  if (status != LLM_SUCCESS) throw Refused(status, why.empty() ? "no clusters are given" : why);
}

}  // namespace

class LlmDataDist::Impl {
 public:
  Impl(std::uint64_t cluster_id, LlmRole role) : cluster_id_(cluster_id), role_(role) {}

  void initialize(const std::map<AscendString, AscendString>& options) {
    if (forked()) throw Refused(LLM_FAILED, "this process is a forked child of the one that made the instance: make one of its own");
    {
      const std::shared_lock lock(mutex_);
      if (instance_) return;
    }
    const std::unique_lock lock(mutex_);
    if (instance_) return;
    const char* role = rules::role_name(static_cast<std::int64_t>(role_.load()));
    const auto completed = rules::completed(rules::with_environment(rules::from_cpp(plain(options)), environment()), role);
    instance_ = std::make_unique<Instance>(cluster_id_, rules::parse_options(completed));
  }

  void finalize() noexcept {
    if (forked()) {  // no thread of it is here, and any lock may be held for ever
      [[maybe_unused]] auto* leaked = instance_.release();
      return;
    }
    ending_.fetch_add(1);  // threads that go on calling would keep it waiting
    {
      const std::shared_lock lock(mutex_);  // beside the calls that run, whose transfers end
      if (instance_) instance_->end_transfers();
    }
    {
      const std::unique_lock lock(mutex_);
      instance_.reset();
    }
    ending_.fetch_sub(1);
  }

  // Work on the instance, which stays as long as it lasts.
  template <class Work>
  static Status with(Impl* impl, const char* function, std::string_view call, Work&& work) {
    return guarded(function, call, [&] {
      if (impl == nullptr) throw std::bad_alloc();
      if (impl->forked()) throw Refused(LLM_FAILED, "this process is a forked child of the one that made the instance: make one of its own");
      if (impl->ending_.load() != 0) throw Refused(LLM_FAILED, "llm datadist is being finalized");
      const std::shared_lock lock(impl->mutex_);
      if (!impl->instance_) throw Refused(LLM_FAILED, "llm datadist is not initialized");
      work(*impl->instance_);
    });
  }

  void set_role(LlmRole role) { role_ = role; }

 private:
  bool forked() const noexcept { return generation_ != kvferry::process_generation(); }

  const std::uint64_t cluster_id_;
  std::atomic<LlmRole> role_;
  const std::uint32_t generation_ = (kvferry::watch_forks(), kvferry::process_generation());
  std::atomic<int> ending_{0};
  std::shared_mutex mutex_;
  std::unique_ptr<Instance> instance_;
};

// --- life

LlmDataDist::LlmDataDist(uint64_t cluster_id, LlmRole role) : impl_(new (std::nothrow) Impl(cluster_id, role)) {}
LlmDataDist::~LlmDataDist() { Finalize(); }

Status LlmDataDist::Initialize(const std::map<AscendString, AscendString>& options) {
  return guarded("Initialize", "init", [&] {
    if (!impl_) throw std::bad_alloc();
    impl_->initialize(options);
  });
}

void LlmDataDist::Finalize() {
  if (impl_) impl_->finalize();
}

Status LlmDataDist::SetRole(LlmRole role, const std::map<AscendString, AscendString>& options) {
  return Impl::with(impl_.get(), "SetRole", "", [&](Instance& instance) {
    rules::role_name(static_cast<std::int64_t>(role));
    instance.move_listener(rules::cpp_listen(plain(options)));
    impl_->set_role(role);
  });
}

// --- links

Status LlmDataDist::LinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets, int32_t timeout_in_millis) {
  return Impl::with(impl_.get(), "LinkLlmClusters", "link", [&](Instance& instance) {
    rets.clear();
    rules::check_timeout(timeout_in_millis);
    const auto listed = plain(clusters);
    summed_up(listed, instance.link(listed, timeout_in_millis), rets);
  });
}

Status LlmDataDist::UnlinkLlmClusters(const std::vector<ClusterInfo>& clusters, std::vector<Status>& rets, int32_t timeout_in_millis, bool force_flag) {
  return Impl::with(impl_.get(), "UnlinkLlmClusters", "unlink", [&](Instance& instance) {
    rets.clear();
    rules::check_timeout(timeout_in_millis);
    const auto listed = plain(clusters);
    summed_up(listed, instance.unlink(listed, timeout_in_millis, force_flag), rets);
  });
}

// --- caches

Status LlmDataDist::RegisterKvCache(const CacheDesc& cache_desc, const std::vector<uint64_t>& addrs, const RegisterCfg&, int64_t& cache_id) {
  return Impl::with(impl_.get(), "RegisterKvCache", "register", [&](Instance& instance) { cache_id = instance.register_cache(cache_desc, addrs); });
}

Status LlmDataDist::UnregisterKvCache(int64_t cache_id) {
  return Impl::with(impl_.get(), "UnregisterKvCache", "register", [&](Instance& instance) { instance.unregister_cache(cache_id); });
}

Status LlmDataDist::AllocateCache(const CacheDesc& cache_desc, Cache& cache) {
  return Impl::with(impl_.get(), "AllocateCache", "register", [&](Instance& instance) { cache = instance.allocate(cache_desc); });
}

Status LlmDataDist::DeallocateCache(int64_t cache_id) {
  return Impl::with(impl_.get(), "DeallocateCache", "transfer", [&](Instance& instance) { instance.deallocate(cache_id); });
}

// --- transfers

Status LlmDataDist::PullKvCache(const CacheIndex& src_cache_index, const Cache& dst_cache, uint32_t batch_index, int64_t size,
                                const KvCacheExtParam& ext_param) {
  return Impl::with(impl_.get(), "PullKvCache", "transfer", [&](Instance& instance) { instance.pull_row(src_cache_index, dst_cache.cache_id, batch_index, size, ext_param); });
}

Status LlmDataDist::PullKvBlocks(const CacheIndex& src_cache_index, const Cache& dst_cache, const std::vector<uint64_t>& src_blocks,
                                 const std::vector<uint64_t>& dst_blocks, const KvCacheExtParam& ext_param) {
  return Impl::with(impl_.get(), "PullKvBlocks", "transfer",
                     [&](Instance& instance) { instance.pull_blocks(src_cache_index, dst_cache.cache_id, src_blocks, dst_blocks, ext_param); });
}

Status LlmDataDist::PushKvCache(const Cache& src_cache, const CacheIndex& dst_cache_index, uint32_t src_batch_index, int64_t size,
                                const KvCacheExtParam& ext_param) {
  return Impl::with(impl_.get(), "PushKvCache", "transfer", [&](Instance& instance) {
    if (size != -1) throw rules::RuleError(said("size must be -1, but got ", size));
    instance.push_row(src_cache, dst_cache_index, src_batch_index, ext_param);
  });
}

Status LlmDataDist::PushKvBlocks(const Cache& src_cache, const CacheIndex& dst_cache_index, const std::vector<uint64_t>& src_blocks,
                                 const std::vector<uint64_t>& dst_blocks, const KvCacheExtParam& ext_param) {
  return Impl::with(impl_.get(), "PushKvBlocks", "transfer",
                     [&](Instance& instance) { instance.push_blocks(src_cache, dst_cache_index, src_blocks, dst_blocks, ext_param); });
}

Status LlmDataDist::CopyKvCache(const Cache& src_cache, const Cache& dst_cache, uint32_t src_batch_index, uint32_t dst_batch_index, uint64_t offset,
                                int64_t size) {
  return Impl::with(impl_.get(), "CopyKvCache", "transfer", [&](Instance& instance) {
    instance.copy_row(src_cache.cache_id, dst_cache.cache_id, src_batch_index, dst_batch_index, offset, size);
  });
}

Status LlmDataDist::CopyKvBlocks(const Cache& src_cache, const Cache& dst_cache, const std::vector<uint64_t>& src_blocks,
                                 const std::vector<std::vector<uint64_t>>& dst_blocks_list) {
  return Impl::with(impl_.get(), "CopyKvBlocks", "transfer",
                     [&](Instance& instance) { instance.copy_blocks(src_cache.cache_id, dst_cache.cache_id, src_blocks, dst_blocks_list); });
}

}  // namespace llm_datadist
