#include "../links.hpp"
#include "check.hpp"

using namespace llm_datadist::rules;

namespace {

struct Fake {
  std::uint64_t peer;
  bool alive = true;
  std::string program = "llm_datadist, caches by id";
};
using Link = const Fake*;
struct Facts {
  static bool alive(Link link) { return link->alive; }
  static std::uint64_t peer_id(Link link) { return link->peer; }
  static std::string program(Link link) { return link->program; }
};
using Book = LinkBook<Link, Facts>;

EngineOptions remote(bool hixl = false) {
  EngineOptions options;
  options.remote = true;
  options.hixl = hixl;
  options.listen = {"127.0.0.1", 7000};
  return options;
}

void a_transfer_takes_the_newest_live_link_whoever_opened_it() {
  Book book(1, remote(), false);
  Fake old{2}, newer{2}, other{3}, by_key{4, true, "llm_datadist, caches by key"}, stranger{5, true, ""};
  const Book::Links links{&old, &other, &newer, &by_key, &stranger};
  CHECK(!book.known(2) && book.to(2, links).link == &newer && book.known(2) == &newer);
  newer.alive = false;
  CHECK(!book.known(2) && book.to(2, links).link == &old);
  old.alive = false;
  CHECK(book.to(2, links).answer.status == status::not_yet_link);
  CHECK(book.to(4, links).answer.status == status::not_yet_link);  // configured unlike this one
  CHECK(book.to(5, links).link == &stranger);                      // no door of ours: whatever it is
}

void the_link_bears_the_id_that_the_peer_reports() {
  Book book(1, remote(), false);
  Fake link{9}, again{9};
  CHECK(book.may_dial(2, 0, 1, {}).ok() && book.dialled(&link, "127.0.0.1", 7001).ok());
  CHECK(book.to(9, {&link}).link == &link && book.to(2, {&link}).answer.status == status::not_yet_link);
  CHECK(book.may_dial(9, 0, 1, {&link}).status == status::already_link && book.may_dial(2, 0, 1, {&link}).ok());
  CHECK(book.dialled(&again, "127.0.0.1", 7001).status == status::already_link && book.to(9, {&link, &again}).link == &link);
  link.alive = false;
  CHECK(book.may_dial(9, 0, 1, {}).ok() && book.dialled(&again, "127.0.0.1", 7001).ok());
  Fake by_key{8, true, "llm_datadist, caches by key"};
  CHECK(book.dialled(&by_key, "127.0.0.1", 7002).status == status::param_invalid && !book.has_opened(8));
}

void addresses_are_counted() {
  Book book(1, remote(), true), generous(1, remote(), false);
  CHECK(book.may_dial(2, 1, 0, {}).status == status::param_invalid && book.may_dial(2, 1, 2, {}).status == status::param_invalid);
  CHECK(book.may_dial(2, 0, 1, {}).status == status::param_invalid && generous.may_dial(2, 0, 1, {}).ok());
  CHECK(book.may_dial(2, 1, 1, {}).ok() && book.may_dial(3, 0, 1, {}).ok());  // the first link names the local one
}

void a_cluster_may_link_to_itself_and_not_pull_from_itself() {
  Book book(1, remote(), false);
  Fake self{1}, namesake{1};
  CHECK(book.to(1, {}).answer.status == status::param_invalid);
  CHECK(book.to(1, {&namesake}).link == &namesake);  // another process of that id
  CHECK(!book.known(1));                             // asked anew each time
  CHECK(book.dialled(&self, "127.0.0.2", 7000).ok() && book.to(1, {&self}).answer.status == status::param_invalid);
  book.parted(1);
  CHECK(book.to(1, {&namesake}).link == &namesake);
}

void with_hixl_each_side_links_for_itself() {
  Book book(1, remote(true), false);
  Fake theirs{2};
  const Book::Links links{&theirs};
  CHECK(book.may_dial(2, 0, 1, links).ok() && book.adopt(2, links));
  CHECK(book.may_dial(2, 0, 1, links).status == status::already_link && book.has_opened(2));
  CHECK(!Book(1, remote(), false).adopt(2, links));
  const auto parting = book.parting(2, 0, false, links);
  CHECK(parting.answer.ok() && parting.links == links && !parting.tell_if_lost);
}

void parting_names_all_links_of_the_cluster() {
  Book book(1, remote(), false);
  Fake mine{2}, theirs{2}, other{3};
  CHECK(book.dialled(&mine, "127.0.0.1", 7001).ok());
  CHECK(book.parting(4, 1, false, {&mine}).links.empty() && book.parting(4, 0, false, {&mine}).answer.ok());
  CHECK(book.parting(2, 0, false, {&mine}).answer.status == status::param_invalid);
  const auto asked = book.parting(2, 1, false, {&theirs, &other});  // mine went down, and is still in the book
  CHECK(asked.links == Book::Links({&theirs, &mine}) && asked.tell_if_lost);
  const auto forced = book.parting(2, 0, true, {&mine});
  CHECK(forced.links == Book::Links({&mine}) && !forced.tell_if_lost);
  book.parted(2);
  CHECK(!book.has_opened(2) && book.parting(2, 1, false, {}).links.empty());
}

}  // namespace

int main() {
  a_transfer_takes_the_newest_live_link_whoever_opened_it();
  the_link_bears_the_id_that_the_peer_reports();
  addresses_are_counted();
  a_cluster_may_link_to_itself_and_not_pull_from_itself();
  with_hixl_each_side_links_for_itself();
  parting_names_all_links_of_the_cluster();
  return TEST_RESULT();
}
