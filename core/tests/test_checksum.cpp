#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "../checksum.hpp"
#include "check.hpp"

using namespace kvferry;

using Bytes = std::vector<std::uint8_t>;

static std::uint64_t whole(const Bytes& data, std::uint64_t seed = 0) {
  Checksum checksum(seed);
  checksum.add(data.data(), data.size());
  return checksum.end();
}

static Bytes random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes data(count);
  for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
  return data;
}

// The formula as docs/pool.md says it, a word at a time.
static std::uint64_t by_the_book(Bytes data, std::uint64_t seed) {
  const auto mix = [](std::uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
  };
  std::uint64_t all = mix(seed ^ data.size()), lanes[16];
  for (std::uint64_t i = 0; i < 16; ++i) lanes[i] = mix(seed + (i + 1) * 0x9E3779B97F4A7C15);
  while (data.size() % 128 != 0) data.push_back(0);
  for (std::size_t at = 0; at < data.size(); at += 8) {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < 8; ++i) word |= std::uint64_t{data[at + i]} << 8 * i;
    auto& lane = lanes[at / 8 % 16];
    lane ^= word;
    lane ^= lane >> 32;
    lane += (lane & 0xFFFFFFFF) * 0x9E3779B6;
  }
  for (const auto lane : lanes) all = mix(all ^ lane);
  return all == 0 ? 1 : all;
}

static void the_test_vectors_of_the_document_come_out() {
  Bytes counting(1000);
  for (std::size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::uint8_t>(i % 251);
  CHECK(whole({}) == 0x6898BEB0DF43D9A3);
  CHECK(whole({'a', 'b', 'c'}) == 0xA8F77A4B37F81BA3);
  CHECK(whole(counting) == 0xB86942446DD6DD2A);
  CHECK(whole(counting, 0xFEDCBA9876543210) == 0x14570892FD1E9B38);
}

static void every_length_follows_the_formula() {
  for (std::size_t length = 0; length <= 200; ++length) {
    const auto data = random_bytes(length, static_cast<unsigned>(length));
    CHECK(whole(data) == by_the_book(data, 0));
    CHECK(whole(data, length) == by_the_book(data, length));
  }
  const auto large = random_bytes((1 << 20) + 13, 1);
  CHECK(whole(large, 5) == by_the_book(large, 5));
}

static void cuts_make_no_difference() {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const auto data = random_bytes(random() % 400, random());
    Checksum checksum(round);
    for (std::size_t at = 0; at < data.size();) {
      const std::size_t next = std::min<std::size_t>(data.size() - at, random() % 90);
      const Bytes alone(data.begin() + static_cast<std::ptrdiff_t>(at), data.begin() + static_cast<std::ptrdiff_t>(at + next));
      checksum.add(alone.data(), alone.size());  // where a byte too many would be seen by the sanitizer
      at += next;
    }
    CHECK(checksum.end() == whole(data, round));
  }
}

static void every_bit_counts() {
  for (const std::size_t length : {1, 7, 8, 64, 65, 200}) {
    auto data = random_bytes(length, 3);
    std::set<std::uint64_t> seen{whole(data)};
    for (std::size_t bit = 0; bit < 8 * length; ++bit) {
      data[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
      CHECK(seen.insert(whole(data)).second);
      data[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    }
  }
}

static void length_order_and_seed_count() {
  std::set<std::uint64_t> seen;
  for (std::size_t length = 0; length <= 200; ++length) CHECK(seen.insert(whole(Bytes(length))).second);
  for (std::uint64_t seed = 1; seed < 200; ++seed) CHECK(seen.insert(whole(Bytes(64), seed)).second);
  auto data = random_bytes(512, 9);  // any two words change places
  CHECK(seen.insert(whole(data)).second);
  for (std::size_t a = 0; a < 512; a += 8)
    for (std::size_t b = a + 8; b < 512; b += 8) {
      auto changed = data;
      std::swap_ranges(&changed[a], &changed[a] + 8, &changed[b]);
      CHECK(seen.insert(whole(changed)).second);
    }
}

static void of_a_stream_they_are_those_of_its_values_however_it_is_cut_and_repeated() {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t values = 1 + random() % 6;
    std::vector<std::uint64_t> sizes, seeds, expected;
    Bytes stream;
    for (std::size_t i = 0; i < values; ++i) {
      const auto value = random_bytes(1 + random() % 300, static_cast<unsigned>(random()));
      sizes.push_back(value.size());
      seeds.push_back(random());
      expected.push_back(whole(value, seeds[i]));
      stream.insert(stream.end(), value.begin(), value.end());
    }
    ValueSums sums(sizes, seeds);
    if (round % 3 == 0) {  // a first attempt that was given up
      sums.add(0, stream.data(), random() % stream.size());
      sums.begin();
    }
    for (std::size_t sent = 0; sent < stream.size();) {
      const std::size_t offered = 1 + random() % (stream.size() - sent);
      sums.add(sent, stream.data() + sent, offered);
      if (random() % 4 == 0) sums.add(stream.size() + 1, stream.data(), 1);  // does not follow
      sent += random() % (offered + 1);  // the socket took less, and the rest is offered again
    }
    CHECK(sums.taken() == expected);
  }
}

static void of_a_stream_that_has_not_ended_there_are_none() {
  const auto data = random_bytes(20, 3);
  ValueSums sums({10, 10}, {1, 2});
  sums.add(0, data.data(), 19);
  CHECK(sums.taken().empty());
  sums.add(19, data.data() + 19, 1);
  CHECK(sums.taken().size() == 2);
  sums.begin();
  CHECK(sums.taken().empty());
}

static void values_may_be_taken_by_several_each_his_own() {
  const auto data = random_bytes(60, 5);
  ValueSums all({10, 20, 30}, {1, 2, 3}), one_by_one({10, 20, 30}, {1, 2, 3});
  all.add(0, data.data(), data.size());
  ValueSums::Part last(one_by_one, 2), first(one_by_one, 0);
  first.add(data.data(), 25);
  last.add(data.data() + 30, 30);
  last.add(data.data(), 60);  // there is no value behind the last
  CHECK(one_by_one.taken().empty());
  first.add(data.data() + 25, 5);
  CHECK(one_by_one.taken() == all.taken() && all.taken().size() == 3);
  ValueSums told({10, 20, 30}, {1, 2, 3});
  told.take({1, 2});
  CHECK(told.taken().empty());
  told.take(all.taken());
  CHECK(told.taken() == all.taken());
}

static void what_makes_no_values_is_refused() {
  CHECK_FAILS(Kind::invalid_argument, "2 sizes and 1 seeds", ValueSums({1, 2}, {1}));
  CHECK_FAILS(Kind::invalid_argument, "value 1 has 0 bytes", ValueSums({1, 0}, {1, 2}));
  CHECK_FAILS(Kind::invalid_argument, "more than 2^64-1 bytes", ValueSums({UINT64_MAX, 1}, {1, 2}));
}

int main() {
  values_may_be_taken_by_several_each_his_own();
  what_makes_no_values_is_refused();
  the_test_vectors_of_the_document_come_out();
  every_length_follows_the_formula();
  cuts_make_no_difference();
  every_bit_counts();
  length_order_and_seed_count();
  of_a_stream_they_are_those_of_its_values_however_it_is_cut_and_repeated();
  of_a_stream_that_has_not_ended_there_are_none();
  return TEST_RESULT();
}
