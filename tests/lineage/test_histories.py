"""Every rule of the planner as histories: what comes in, what it decides, what is saved."""

from __future__ import annotations

from itertools import permutations

import pytest

from feedapi_client import model
from feedapi_client.lineage import planner
from feedapi_client.lineage.states import (
    TRANSITIONS,
    Entry,
    State,
    move_entry,
)
from tests.lineage.histories import History, parsed

HISTORIES = """
# When a partition is read, and when it is over
r04_a_child_waits_for_its_parent_where_order_is_kept
  list 0! 1<0 -> save 0 1; start 0 | 0R 1W(0)
  given ordered=False / list 0! 1<0 -> save 0 1; start 0; start 1 | 0R 1R
r05_a_checkpoint_changes_nothing
  list 0 / delivered 0 / checkpoint 0 a -> 0@a#2 / checkpoint 0 a -> 0@a#2
  checkpoint 0 b after -> 0@b#3 / restart / list 0 -> start 0
r05_lineage_goes_on_when_the_last_batch_is_committed_and_released
  list 0!z 1<0 / delivered 0 / checkpoint 0 z -> 0@z:drained#2 | 0R 1W(0)
  release 0 -> stop 0; save 0@z:drained#3 1#2; drained 0@z; start 1; discover | 0D 1R
  given / list 0!z 1<0 / delivered 0 / release 0 -> | 0R 1W(0)
  given 0@z / list 0 1<0 / delivered 0 / list 0!z 1<0 -> | 0R 1W(0)
r05_a_batch_that_is_released_late_takes_no_older_position_back
  given 0@a shared=True / list 0 / refresh owned=[0] others=[] / delivered 0
  checkpoint 0 b -> 0@b#2 / committed 0 / refused 0 / stored 0@c:superseded#9 1@c
  refresh others=[1] -> discover / release 0 -> | 0S 1W / checkpoint 0 d -> 0@d#10
r06_a_last_cursor_drains_where_it_is_committed_and_nowhere_else
  list 0!z / commit 0 z -> stop 0; drained 0@z; discover | 0D
  given / list 0 / commit 0 z / list 0!z -> stop 0; save 0@z:drained#3; drained 0@z; discover | 0D
  given / list 0!z 1<0 / commit 0 y / end 0 y closed -> | 0R 1W(0)
  given selects_events=True / list 0!z / commit 0 z -> | 0R / commit 0 y
  end 0 y closed -> stop 0; save 0@y:drained#4; drained 0@y; discover | 0D
  given 0@z / list 0!z -> save 0@z:drained#2; drained 0@z; discover
r06_without_a_last_cursor_only_an_end_that_was_asked_for_as_closed_counts
  list 0! / commit 0 z / end 0 z -> | 0R
  end 0 z closed -> stop 0; save 0@z:drained#3; drained 0@z; discover | 0D
r06_an_open_partition_at_its_end_is_caught_up_until_the_next_event_or_until_it_closes
  list 0 / commit 0 z / finished -> False / end 0 z -> | 0C / finished -> True / progressed 0
  finished -> False | 0R
  given / list 0 / commit 0 z / end 0 z / list 0! -> start 0@z | 0R
  given / list 0 / commit 0 z / end 0 z
  list 0!z -> stop 0; save 0@z:drained#3; drained 0@z; discover | 0D
  given / list 0 / end 0 _first / list 0 1<<0 -> stop 0; save 0:superseded#2 1; start 1 | 0S 1R
  given / list 0 / end 0 _first / list -> stop 0; report 0 ~stops at its cursor '_first' | 0V
  given / list 0 / end 0 _first / fail 0 -> stop 0 | 0P
  given shared=True / list 0 / refresh owned=[0] / end 0 _first / revoke 0 -> stop 0 | 0E
  given 0@a 9@q / list 0 9 2 / end 2 _first
  list 9 2<<0 -> stop 2; stop 0; save 0@a:superseded#2 2@a; start 2@a | 0S 2R 9R
  given / list 0 / delivered 0 / end 0 z / finished -> False / release 0 / finished -> True
r06_an_uncommitted_end_drains_nothing_and_is_reported_once_where_children_wait
  list 0! 1<0 / delivered 0 / release 0
  end 0 z closed -> report 0 ~not committed: partition 1 can't start | 0R 1W(0) / end 0 z closed ->
  release 0 z -> stop 0; save 0@z:drained#3 1#2; drained 0@z; start 1; discover | 0D 1R
r06_a_parent_that_is_not_listed_any_more_while_its_end_is_being_saved_stays_drained
  list 0! 1<0 / slow / end 0 _first closed -> stop 0; save 0:drained#2 1#2; drained 0; start 1;
      discover
  list 1<0 -> | 0D 1R
r06_r15_an_end_seen_before_the_partition_was_open_again_drains_nothing_and_it_is_asked_on
  list 0! 1<0 / delivered 0 / end 0 z closed ->
  list 0 1<0 -> report 1 ~waits for partition 0; start 0 / list 0! 1<0 ->
  release 0 z -> | 0R 1W(0)
  given / list 0! 1<0 / delivered 0 / end 0 z closed / progressed 0 / release 0 z -> | 0R 1W(0)
  given 0@a shared=True / list 0! 1<0 / refresh owned=[0,1] others=[] / delivered 0 / end 0 z closed
  revoke 0 / list 1<0 / list 0! 1<0 / release 0 z -> | 0E 1W(0)
  given 0@z:drained 1@z:drained / list 0! 1!<0
  list 0 1<0 -> save 0@z#2; start 0@z; report 1 ~waits for partition 0 | 0R 1W(0)
  list 0 1!<0 -> | 0R 1W(0)
r06_a_partition_that_is_open_when_its_end_is_saved_shows_its_end_anew
  list 0! 1<0 / delivered 0 / end 0 z closed / checkpoint 0 z -> 0@z:drained#2 / list 0 1<0
  release 0 -> save 0@z#3 | 0R 1W(0) / list 0! 1<0 -> | 0R 1W(0)
r06_a_drained_partition_that_opens_again_is_read_on_and_open_in_the_store
  given 0@z:drained#4 / list 0! -> | 0D / list 0 -> save 0@z#5; start 0@z | 0R
  listed_again -> 0 ~feedapi cursors restore / list 0 -> / listed_again -> 0 ~read on / restart
  list 0! -> start 0@z | 0R
  given 0@z:drained#4 / list 0!z / listed_again -> / list 0 / commit 0 zz -> / listed_again ->
r06_an_event_behind_a_drained_end_is_read_on
  given 0@a / list 0! 1<0 / reopened 0 ->
  end 0 a closed -> stop 0; save 0@a:drained#2 1; drained 0@a; start 1; discover | 0D 1R
  reopened 0 -> save 0@a#3; start 0@a | 0R 1R / commit 0 b ->
  end 0 b closed -> stop 0; save 0@b:drained#5; drained 0@b; discover | 0D 1R
r06_a_drained_partition_with_another_last_cursor_is_reported_and_asked_once_more
  given 0@z:drained#3 / list 0!zz 1<0 -> save 0@z:drained#4 1; report 0 ~'z' ~'zz': it is asked once
      more; start 1 | 0D 1R
  doubted 0 -> True / list 0!zz 1<0 ->
  given 0@zz:drained#3 / list 0!zz 1<0 -> save 0@zz:drained#4 1; start 1 / doubted 0 -> False
# Where a consumer begins
r07_the_first_start_is_one_save_before_all_else
  list 0 1 2! -> save 0 1 2; start 0; start 1; start 2 | 0R 1R 2R
r07_a_start_at_the_end_asks_for_ends_that_are_not_listed_or_of_selected_events
  given start="last" / unresolved 0 1^l1 2!l2 3! -> 0; 3
  list 0 1^l1 2!l2 3! ends={0:"e0",3:"e3"} -> save 0@e0 1@l1 2@l2:drained 3@e3:drained; start 0@e0;
      start 1@l1; discover | 0R 1R 2D 3D
  restart / list 0 1 2 3 -> save 2@l2#2 3@e3#2; start 0@e0; start 1@l1; start 2@l2; start 3@e3
  given start="last" selects_events=True / unresolved 0 1!l1 2^l2 -> 0; 1; 2
  list 0 1!l1 2^l2 ends={0:"a",1:"b",2:"c"} -> save 0@a 1@b:drained 2@c; start 0@a; start 2@c;
      discover
r07_a_partition_that_appears_later_begins_at_its_first_event_and_is_saved_by_its_first_commit
  list 0 / list 0 1 -> start 1 / checkpoint 1 a -> 1@a
  given start="last" / list 0 ends={0:"e"} / unresolved 0 1 -> / list 0 1 -> start 1
  checkpoint 1 a -> 1@a
r07_start_counts_for_the_first_discovery_that_lists_any_of_an_empty_store
  given start="last" / list -> / starts_first -> True / unresolved 0 -> 0 / list 0 ends={0:"e"} | 0R
  starts_first -> False / unresolved 0 1 ->
  given 0@a start="last" / unresolved 0 1 -> / list 0 1 | 0R 1R
r07_start_gives_ends_and_cursors_and_no_position_is_ever_last
  given start="last" / list 0 -> NoProgressError ~present end is not known
  given start={0:"_last"} / unresolved 0 1 -> 0
  list 0 1 ends={0:"e"} -> save 0@e 1; start 0@e; start 1
  given start={0:"_last"} / list 1<<0 -> NoProgressError ~present end is not known
  given start={9:"c"} / list 0 1 -> LineageError ~not selected, or not listed
  list 0 9 -> save 0 9@c; start 0; start 9@c | 0R 9R
r07_what_is_gone_from_the_store_does_not_begin_at_its_first_event_unless_it_was_never_saved
  given 0@a 1@b shared=True / list 0 1 / refresh owned=[0] others=[1] / revoke 0 / gone 0
  refresh owned=[0] others=[1] -> fail 0 StoreError ~its position is no longer in the store | 0P 1E
  given 0@a 1@b shared=True / list 0 1 / refresh owned=[0] others=[1] / refused 0 / gone 0
  refresh owned=[0] others=[1] -> fail 0 StoreError ~its position is no longer in the store | 0P 1E
  given 9@q shared=True / list 9 1 / refresh owned=[1] others=[] / delivered 1 / refused 1
  release 1 / refresh owned=[1] others=[] -> start 1 | 1R 9E
r17_a_load_that_was_under_way_when_a_position_was_found_does_not_say_that_it_is_gone
  given 0@a shared=True / list 0 1 / load slow / load fast / stored 1@b#9 / answer slow
  refresh began="slow" owned=[0] others=[1] -> start 0@a | 0R 1E
  refresh began="fast" owned=[0] others=[1] -> | 0R 1E
  gone 1 / load next / refresh began="next" -> fail 1 StoreError ~no longer in the store | 0R 1P
r17_what_was_decided_of_a_partition_that_is_gone_from_the_store_counts_no_more
  given 0@a 1@b shared=True / list 0 1 / refresh owned=[0,1] others=[] / gone 0
  list 0! 1 2<<0 / refused 0 2
  refresh owned=[0,1,2] others=[] -> fail 0 StoreError ~no longer in the store | 0P 1R 2P(0)
  given 0@a 1@b shared=True / list 0 1 / refresh owned=[0,1] others=[] / gone 0
  list 0!a 1 2<0 / refused 0
  refresh owned=[0,1,2] others=[] -> fail 0 StoreError ~no longer in the store | 0P 1R 2P(0)
r17_nothing_follows_a_drained_partition_that_is_gone_from_the_store
  given 0@a:drained 3@q shared=True / list 0!a 1<0 3 / refresh owned=[3] others=[] / gone 0
  refresh owned=[1,3] others=[] -> fail 0 StoreError ~no longer in the store | 0P 1P(0) 3R
  given 0@a:drained 3@q shared=True / list 3 1<0 / refresh owned=[3] others=[] / gone 0
  refresh owned=[1,3] others=[] -> save 0@a:drained#2 1; start 1 | 0D 1R 3R
  given 0@a:superseded 3@a shared=True / list 0!a 3<<0 / refresh owned=[3] others=[] / gone 0
  refresh owned=[3] others=[] -> | 0S 3R
r17_what_begins_at_its_first_event_is_saved_with_the_ends_before_it
  given 0@z:drained 1 2@q / list 0!z 1<0 2<0 3<0 -> save 0@z:drained#2 1#2 3; start 1; start 2@q;
      start 3
  given 0@z:drained 1 ordered=False / list 0!z 1<0 -> start 1
  given 0@z:drained / list 0!z 1!_first<0 2<1
  given 0@z:drained 1@b:drained / list 0!z 1!b<0 2<1 -> save 1@b:drained#2 2; start 2
r17_what_another_instance_reads_is_no_end_and_is_not_saved_to_be_compared
  given 3 7:drained 11 shared=True / list 3! 11<7 7!<<6
  refresh owned=[11] others=[3] -> save 7:drained#2 11#2; start 11 | 3E 7D 11R
r17_an_end_is_saved_before_it_is_compared
  given 0@a:drained 1 2@b / list 0!a 1<0 2!b<0 3<2 -> save 0@a:drained#2 1#2 2@b:drained#2 3; start
      1; drained 2@b; start 3; discover
r17_a_cursor_that_was_taken_before_is_saved_where_it_is_taken_again
  given 0@z:superseded 1@b / list 1<<0 / list 1<<0 2<<0 3<<0 -> save 0@z:superseded#2 2@z 3@z;
      start 2@z; start 3@z
# Parents and children, listed or not
r08_a_child_of_an_open_parent_waits_and_is_reported_once
  list 0 1<0 -> save 0 1; start 0; report 1 ~waits for partition 0 | 0R 1W(0) / list 0 1<0 ->
r08_a_parent_that_is_not_listed_is_lost_unless_it_was_drained_or_is_history
  list 1<0 -> save 1; start 1
  given 9@a / list 9 1<0 -> start 9@a; fail 1 LostPartitionError | 1P 9R
  given 0@a:drained / list 1<0 | 0D 1R
  given 0@a / list 1<0 | 0V 1W(0) / list 1<0 | 0V 1P
  given 0@z:superseded#4 9@c
  list 9 2<<0 4<0 -> save 0@z:superseded#5 2@z; start 2@z; start 9@c;
      fail 4 LostPartitionError | 0S 2R 4P 9R
  given 9@a 0@z:drained / list / list 0<9 -> fail 0 LostPartitionError | 0P 9V
r08_a_partition_waits_for_the_parent_of_a_drained_parent
  given 1@e:drained 0@a#5 / list 0! 1!<0 2<1 | 0R 1D 2W(0) / commit 0 z / end 0 z closed | 0D 1D 2R
  given 1@e:drained / list 0! 1!<0 2<1 | 0R 1D 2W(0) / commit 0 z / end 0 z closed | 0D 1D 2R
r08_what_waits_does_not_depend_on_the_order_of_the_list
  given 0@z:drained#3 / list 1<0 0 | 0R 1W(0)
  given 0@z:drained#3 / list 0 1<0 | 0R 1W(0)
  given 0@z:drained#3 shared=True / list 1<0 0 / refresh owned=[0,1] others=[] | 0R 1W(0)
  given 0@z:drained#3 shared=True / list 0 1<0 / refresh owned=[0,1] others=[] | 0R 1W(0)
r08_a_child_that_is_listed_again_waits_for_its_parent_in_flight
  given 0@a / list 0! 1<0 / delivered 0 / list 0! | 0R 1V / list 0! 1<0 | 0R 1W(0) / end 0 z closed
  release 0 z | 0D 1R
r08_one_hole_in_one_discovery_is_not_final
  given 0@a / list 0! 1<0
  list 1<0 -> stop 0; report 0 ~stops at its cursor 'a'; discover | 0V 1W(0) / finished -> False
  list 0! 1<0 -> start 0@a | 0R 1W(0) / list 1<0 / list 1<0 -> fail 1 LostPartitionError | 0V 1P
r08_the_children_of_a_drained_parent_that_is_split_later_are_read_and_those_that_had_begun
  given 0@z:drained#3 1@q / list 0! 1
  list 2<<0 3<<0 1 4<0 -> save 0@z:superseded#4 2@z 3@z 4; start 2@z; start 3@z; start 4 | 0S 1R 2R
      3R 4R
  given 0@z:superseded#4 4@c / list 2<<0 4<0 -> save 0@z:superseded#5 2@z; start 2@z;
      start 4@c | 0S 2R 4R
r08_a_missing_edge_is_suspected_where_a_partition_is_closed_and_new_roots_appear
  list 0 9 / list 0!z 9 1 2 -> report feed ~lineage={1: 0, 2: 0}; start 1; start 2
  list 0!z 9 1 2 -> / list 0!z 9 1 2 3 -> start 3
  given / list 0 / list 0! -> / list 0! 1 -> report feed ~lineage={1: 0}; start 1
  given 0@a 9@b / list 0! 9 1 -> report feed ~lineage={1: 0}; start 0@a; start 9@b; start 1
  given / list 0!z 1 -> save 0 1; report feed ~lineage={1: 0}; start 0; start 1
  given / list 0! 1! 2 -> save 0 1 2; report feed ~lineage={1: 0, 2: 0}; start 0; start 1; start 2
  given / list 0 1 2! -> save 0 1 2; start 0; start 1; start 2
  given / list 0 3 5 / list 0 3!z 5 ->
  list 0 3!z 5!z 6 7 -> report feed ~lineage={6: 5, 7: 5}; start 6; start 7
r08_no_missing_edge_is_suspected_of_anything_else
  list 0 9 / list 0 9 1 -> start 1
  given / list 0 9 / list 0! 9 ->
  given / list 0 9 / list 0! 9 1<0 2 -> start 2
  given / list 0 9 / list 0! 9 1<<0 2 -> stop 0; save 0:superseded#2 1; start 1; start 2
  given / list 0 9 / list 0! 9 1<9 -> report 1 ~waits for partition 9
  given 0@z:drained 9@b / list 0!z 9 1 -> start 9@b; start 1
  given partitions=[0,2] / list 0!z 1<0 2 -> save 0 2; start 0; start 2
r08_lineage_mends_a_missing_edge
  given lineage={1:0,2:0} / list 0!z 1 2 9 -> save 0 1 2 9; start 0; start 9 | 0R 1W(0) 2W(0) 9R
  commit 0 z | 0D 1R 2R 9R
  given lineage={1:0} / list 0!z 1<0 | 0R 1W(0)
  given lineage={1:0,2:0} / list 0 9 | 0R 9R / list 0! 1 2 9 | 0R 1W(0) 2W(0) 9R
r08_what_lineage_names_need_not_be_listed_yet_or_any_more
  given 0@z:drained 1@a lineage={1:0} / list 1 | 0D 1R / list 2 1 -> start 2
  given lineage={1:0} / list 0!z 1 / list 0!z | 0R 1V
  given 0@a lineage={1:0,3:1} / list 0 -> start 0@a / list 0 ->
  given 0@a lineage={1:0} / list 0 -> start 0@a / list 0! 1 -> | 0R 1W(0)
r08_impossible_edges_of_lineage_are_errors_that_change_nothing
  given lineage={1:1}
  list 0! 1 -> LineageError ~partition 1: with the edges of lineage= startsAfterPartition
  given lineage={1:0,0:1}
  list 0! 1 -> LineageError ~partition 0: with the edges of lineage= the lineage has a cycle
  list 1 -> LineageError ~partition 1: with the edges of lineage= the lineage has a cycle
  given lineage={1:0}
  list 0! 1<<5 -> LineageError ~partition 1: ~starts after 0 ~with cursorFromPartitions 5
  list 0! 2 1<2 -> LineageError ~partition 1: ~starts after 0 ~with startsAfterPartition 2
  given lineage={1:None}
  list 0! 1<0 -> LineageError ~partition 1: ~starts after nobody ~with startsAfterPartition 0
  given lineage={1:0} / list 0 2
  list 0 2 1<2 -> LineageError ~partition 1: ~starts after 0 ~with startsAfterPartition 2
      | 0R 2R
r08_an_edge_to_a_partition_never_seen_is_reported_once_and_counts_later
  given lineage={1:7}
  list 1 -> save 1; report feed ~1 starts after partition 7, which was never listed; start 1
  list 1 ->
  given 0@a lineage={1:7} / list 0 / list 0 7! 1 -> start 7 | 0R 1W(7) 7R
  given 0@a lineage={1:7}
  list 0 1 -> report feed ~1 starts after partition 7, which was never listed; start 0@a; start 1
      | 0R 1R
r08_roots_of_a_go_publisher_wait_until_partition_0_is_drained
  list dialect="v2-token" 0 9 / commit 9 k / list dialect="v2-token" 0! 9 1 2 | 0R 1W(0) 2W(0) 9R
  list dialect="v2-token" 0! 9 1 2 3 -> | 0R 1W(0) 2W(0) 3W(0) 9R
  end 0 _first closed | 0D 1R 2R 3R 9R
  given / list dialect="v2-token" 0! 1 2 | 0R 1W(0) 2W(0)
  given 0@a 9@b 1
  list dialect="v2-token" 0! 9 1 2 -> report feed ~partitions 1, 2 may ~lineage={1: None};
      start 0@a; start 9@b | 0R 1W(0) 2W(0) 9R
r08_nobody_waits_for_partition_0_without_a_need
  list dialect="v2-token" 0 1 2 | 0R 1R 2R
  given / list dialect="v2-token" 0! 1<0 2 | 0R 1W(0) 2R
  given / list dialect="v2-token" 0! 1<<0 2 | 0S 1R 2R
  given / list dialect="v2-token" 1 2 | 1R 2R
  given / list 0! 1 | 0R 1R
  given ordered=False / list dialect="v2-token" 0! 1 -> save 0 1; start 0; start 1
  given 0@z:drained / list dialect="v2-token" 0! 1 -> save 0@z:drained#2 1; start 1
  given / list dialect="v2-token" 0!<4 4!e 3<<8 1 | 0W(4) 1W(0) 3W(0,4) 4R 8S
  given lineage={3:None} / list dialect="v2-token" 0! 1 3 | 0R 1W(0) 3R
  given start="last"
  list dialect="v2-token" 0! 1 ends={0:"z",1:"e"} -> save 0@z:drained 1@e; start 1@e; discover
  given start={1:"e"} / list dialect="v2-token" 0! 1 2 | 0R 1R 2W(0)
# Successors take the cursor of an ancestor
r09_all_successors_and_the_ancestor_are_saved_at_once_and_then_started
  given 0@a#7 / list 0
  list 1<<0 2<<0 -> stop 0; save 0@a:superseded#8 1@a 2@a; start 1@a; start 2@a | 0S 1R 2R
r09_successors_wait_for_the_batch_in_flight_of_each_ancestor_of_a_merge
  given 0@a / list 0 / delivered 0 / list 1<<0 -> stop 0; discover | 0V 1W(0)
  release 0 b -> save 0@b:superseded#3 1@b; start 1@b
  given 0@a / list 0 / delivered 0 / list 1<<0 / release 0 -> save 0@a:superseded#2 1@a; start 1@a
  given 0@a 1@b / list 0 1 / delivered 0
  list 2<<0,9 3<<1,9 -> stop 1; stop 0; save 1@b:superseded#2 3@b; start 3@b; discover | 0V 1S 2W(0)
      3R
  release 0 -> save 0@a:superseded#2 2@a; start 2@a
  given 0@a 1@a / list 0 1 / delivered 1
  list 2<<0,1 3<<0 -> stop 0; stop 1; discover | 0V 1V 2W(1) 3W(0)
  release 1 -> save 0@a:superseded#2 1@a:superseded#2 2@a 3@a; start 2@a; start 3@a
  given 0@a 1@a 4@a / list 0 1 4 / delivered 0
  list 2<<0,1 3<<1,4 -> stop 0; stop 1; stop 4; discover | 0V 1V 2W(0) 3W(1,4) 4V
r09_the_first_ancestor_that_is_not_superseded_counts_or_else_a_superseded_one
  given 0@old:superseded#5 1@new
  list 2<<1,0 3<<1,0 -> save 1@new:superseded#2 2@new 3@new; start 2@new; start 3@new
  given 0@a:superseded#5 1@far / list 1<<0 2<<0 -> save 0@a:superseded#6 2@a; start 2@a; start 1@far
r09_ancestors_at_different_cursors_are_ambiguous_and_at_the_same_are_not
  given 0@a 1@b
  list 2<<0,1 -> fail 2 AmbiguousLineageError ~different ones: 0 at 'a', 1 at 'b' | 0V 1V 2P
  given 0@a 1@a / list 2<<0,1 -> save 0@a:superseded#2 1@a:superseded#2 2@a; start 2@a | 0S 1S 2R
r09_the_ancestors_of_an_ambiguous_successor_stay_as_they_are
  given 1@b 3@a
  list 8<<3,0 9<<1,7,0,3 -> fail 8 AmbiguousLineageError ~of partition 9 stand at different ones;
      fail 9 AmbiguousLineageError ~different ones: 1 at 'b', 3 at 'a' | 1V 3V 8P 9P
  given 1@b 3@a / list 9<<1,7,0,3 8<<3,0 | 1V 3V 8P 9P
r09_what_vanished_may_be_what_a_successor_without_a_cursor_goes_on_from
  given 9@a / list 2<<0 -> report 9 ~stops at its cursor 'a'; discover
  list 2<<0 -> fail 2 LostPartitionError ~partition 9 had one and vanished | 2P 9V
  given 0@a 1@b / list 0 1
  list 0 2<<7 -> stop 1; report 1 ~stops at its cursor 'b'; discover | 0R 1V 2W(1)
  list 0 2<<7 -> fail 2 LostPartitionError ~partition 1 had one and vanished | 0R 1V 2P
  given 0@a:superseded 1@b 2@c / list 3<<0 4<<0 | 0S 1V 2V 3W(1,2) 4W(1,2)
  list 3<<0 4<<0 -> fail 3 LostPartitionError
      ~partitions 1, 2 had one; fail 4 LostPartitionError ~partitions 1, 2 had one | 0S 1V 2V 3P 4P
r09_a_successor_of_unknown_ancestors_is_reported_where_something_is_stored
  given 0@a:drained
  list 0!a 2<<1 -> save 0@a:drained#2 1:superseded 2; report 2 ~begins at its first event
      ~(partition 1); start 2
  list 0!a 2<<1 ->
  given / list 2<<1 -> save 1:superseded 2; start 2
  given 0@a / list 0!z 1<0 / list 0!z 2<<1 -> save 1:superseded 2
r09_ancestors_named_before_the_one_with_a_cursor_are_superseded_unknown_or_not
  given 3@c#4
  list 5<<3 6<<3 2<<7,5,3 4<<5,3 -> save 2@c 3@c:superseded#5 4@c 5@c:superseded 6@c 7@c:superseded;
      start 6@c; start 2@c; start 4@c | 2R 3S 4R 5S 6R 7S
  list 3 | 2V 3S 4V 5S 6V 7S / list 5<<3 7<<5,3 3 | 2V 3S 4V 5S 6V 7S / restart
  list 5<<3 7<<5,3 3 | 2V 3S 4V 5S 6V 7S
  given 3@c#4 / list 4<<5,3 2<<7,5,3 6<<3 5<<3 | 2R 3S 4R 5S 6R 7S
  given 3@c:superseded#2 2@far / list 2 4<<5,3 -> save 3@c:superseded#3 4@c 5@c:superseded;
      start 4@c; start 2@far
r09_a_partition_that_is_listed_again_is_not_lost
  given 0@a:drained 4@b / list 0! 4<0 / list 0 | 0R 4V
  list 0! 4<0 7<<5 -> save 5:superseded 7; report 7 ~begins at its first event ~(partition 5) | 0R
      4W(0) 5S 7W(0)
r09_an_ancestor_is_not_read_once_a_successor_has_begun_whatever_is_listed
  given start="last" / list 1<<0 ends={1:"z"} -> save 0:superseded 1@z; start 1@z
  list 0 -> stop 1; report 1 ~stops at its cursor 'z' / list 0 1<<0 -> start 1@z
  given 1@z / list 1<<0
  list 0 -> stop 1; save 0:superseded; report 1 ~stops at its cursor 'z' | 0S 1V
  given / list 0 1<<0 -> save 0:superseded 1; start 1 | 0S 1R / listed_again ->
  given 9@a / list 9 1<<0 | 0S 1R 9R / list 9 0 1<<0 | 0S 1R 9R
  given 0@60 / list 10<<0 / list 20<<10,0 | 0S 10S 20R / list 10<<0 | 0S 10S 20V
r09_successors_that_begin_at_the_first_event_never_wait_in_a_circle
  list 1!<<0 2!<1 4!<<3 5!<4 | 0S 1R 2W(1) 3S 4W(1,2) 5W(4)
  end 1 _first closed | 0S 1D 2R 3S 4W(2) 5W(4) / end 4 _first closed | 0S 1D 2R 3S 4W(2) 5W(4)
  end 2 _first closed | 0S 1D 2D 3S 4R 5W(4) / end 5 _first closed | 0S 1D 2D 3S 4R 5W(4)
r08_a_closed_ancestor_that_goes_on_being_listed_holds_no_successor_back
  list 0! 1<<0 | 0S 1R / list 0! 2<<1 7<<6 | 0S 1S 2R 6S 7R / restart
  list 0! 2<<1 7<<6 8<<3 | 0S 1S 2R 3S 6S 7R 8R
r08_the_parent_of_an_ancestor_that_was_listed_is_known
  given 9@q / list 9 0! 5! 1<0 / list 9 0! 5! 2<<1 -> save 1:superseded 2 | 0R 1S 2W(0) 5R 9R
r09_an_edge_that_is_listed_late_lets_a_partition_begin_again_at_that_cursor
  given 0@a 9@q / list 0 9 2
  list 9 2<<0 -> stop 2; stop 0; save 0@a:superseded#2 2@a; start 2@a | 0S 2R 9R
r09_a_successor_waits_while_another_instance_has_an_ancestor_of_a_sibling
  given 0@a 1@a shared=True / list 0 1 / refresh owned=[0] others=[1] / list 2<<0,1 3<<0
  refresh owned=[0,3] others=[1] -> | 0V 1V 2W(1) 3W(0) / leasable -> 0,1; 0
  given 0@a shared=True / list 0 / refresh others=[] / list 1<<0 -> discover | 0V 1W(0)
  leasable -> 0
r09_a_successor_waits_for_another_one_that_takes_the_same_cursor
  given 0@a shared=True / list 0 / load early / refresh owned=[0] others=[] looked="early"
  list 3<<0 5<<2,0 -> stop 0; discover | 0V 3W(0) 5W(2) / looks_again -> True / leasable -> 0; 0
  load again / refresh owned=[0,3] others=[] looked="early" ->
  refresh owned=[0,3] others=[] looked="again" -> save 0@a:superseded#2 2@a:superseded 3@a 5@a;
      start 3@a | 0S 2S 3R 5E
r09_leases_that_were_seen_before_a_split_was_listed_permit_no_transfer
  given 0 shared=True / list 0 1 / load early / list 0 2<<1
  refresh owned=[0] others=[] looked="early" -> start 0 | 0R 1V 2W(1) / looks_again -> True
  load again / refresh owned=[0] others=[] looked="again" -> save 1:superseded 2 | 0R 1S 2E
  given 0 shared=True / list 0 1 / list 0 2<<1 / load now
  refresh owned=[0] others=[1] looked="now" -> start 0 | 0R 1V 2W(1)
# What is no longer listed, listed again, or broken
r11_a_vanished_partition_stops_is_reported_and_comes_back
  given 0@a / list 0 / list -> stop 0; report 0 ~stops at its cursor 'a' | 0V / list ->
  list 0 -> start 0@a / list 1<<0 -> stop 0; save 0@a:superseded#2 1@a; start 1@a
r11_a_superseded_partition_is_a_problem_while_it_and_no_successor_is_listed_open
  given 0@60:superseded#3 10@80 / list 0 -> report 10 ~stops at its cursor '80' | 0S 10V
  listed_again -> 0 ~feedapi cursors restore / list 10<<0 -> start 10@80 / listed_again -> | 0S 10R
  given 0@60 / list 0 10<<0 -> save 0@60:superseded#2 10@60; start 10@60 / listed_again ->
  list 0 11<<10 -> stop 10; save 10@60:superseded#2 11@60; start 11@60
  listed_again -> | 0S 10S 11R
  given 0@60:superseded#3 10@80 / list 0! / listed_again ->
r11_a_cursor_that_was_moved_back_is_read_on_and_goes_forward_again
  given 0@80#4 10@80:superseded#5 / list 0 -> start 0@80 / listed_again -> / commit 0 100
  list 10<<0 -> stop 0; save 0@100:superseded#6 10@100#6; start 10@100 | 0S 10R
  given 0@100#5 10@80:superseded#5
  list 10<<0 11<<0 -> save 0@100:superseded#6 10@100#6 11@100; start 10@100; start 11@100
      | 0S 10R 11R
  given 0@100#5 10@80:superseded#5 shared=True / list 10<<0 -> / leasable -> 0
  refresh owned=[0] others=[] -> save 0@100:superseded#6 10@100#6 | 0S 10E
  given 0@60:superseded#3 10@80#4 shared=True / list 0 / stored 0@80#4 10@80:superseded#5
  refresh owned=[0] others=[] -> start 0@80; discover | 0R 10S
  given 0@a 1@b 2@a:superseded#2
  list 2<<0,1 -> fail 2 AmbiguousLineageError ~different ones: 0 at 'a', 1 at 'b' | 0V 1V 2P
r12_a_bad_discovery_leaves_everything_as_it_was
  list 0 / list 0<1 1<0 -> LineageError ~partition 0: the lineage | 0R
  given start="last" / list 0<0 -> LineageError ~partition 0: startsAfterPartition
  unresolved 0 -> 0 / list 0 ends={0:"e"} -> save 0@e; start 0@e
r12_impossible_lineage_names_the_partition
  list 7<7 -> LineageError ~partition 7: startsAfterPartition
  list 7<<7 -> LineageError ~partition 7: cursorFromPartitions
  list 7<<3,7 -> LineageError ~partition 7: cursorFromPartitions
  list 7<8 8<7 -> LineageError ~partition 7: the lineage
  list 7<8 8<9 9<7 -> LineageError ~partition 7: the lineage
  list 7<<8 8<<7 -> LineageError ~partition 7: the lineage
  list 7<8 8<<7 -> LineageError ~partition 7: the lineage
  list 7<0<<0 -> LineageError ~partition 7: both
r18_a_failure_parks_what_descends_from_it_also_later_and_nothing_else
  list 9 0! 1!<0 2<1 / fail 0 -> stop 0 | 0P 1P(0) 2P(0) 9R / finished -> False
  given 0@a 1@b / list 0 1 / delivered 0 / delivered 1 / list 2<<0 3<<1 -> stop 0; stop 1; discover
  fail 0 -> | 0P 1V 2P(0) 3W(1)
  release 1 c -> save 1@c:superseded#3 3@c; start 3@c | 0P 1S 2P(0) 3R
  given 0@a 1@b / list 0 1 / fail 1
  list 0 2<<7 -> save 2 7:superseded; report 2 ~begins at its first event ~(partition 7); start 2 |
      0R 1P 2R 7S
  given 0@a / list 0! / fail 0 / list 0! 1<0 2<<0 -> | 0P 1P(0) 2P(0) / finished -> True
  given 9@a / list 9 1 / fail 1 / list 9 2<<1 -> | 1P 2P(1) 9R
  given 0@z:drained / list 0! 1<0 / fail 0 -> | 0D 1R
  given 0@z:superseded 1@z / list 1<<0 / fail 0 -> | 0S 1R
r18_what_is_parked_is_told_once_and_stays_parked
  given 0@a 1@b / list 2<<0,1 -> fail 2 AmbiguousLineageError ~different ones: 0 at 'a', 1 at 'b'
  list 2<<0,1 -> / list 2<<0,1 -> / list 0 -> start 0@a | 0R 1V 2P
  given 9@a 0@z:drained / list 9 0!<9 / list 0<9 / list 0<9 -> fail 0 LostPartitionError | 0P 9V
  list 0<9 ->
# Several instances
r06_a_list_older_than_the_store_opens_nothing_again
  given 0@a shared=True / list 0 1<0 / stored 0@z:drained#3
  refresh owned=[0,1] others=[] -> save 0@z:drained#4 1; start 1;
      discover / refresh owned=[0,1] others=[] | 0D 1R
  end 0 z -> / list 0! 1<0 -> / listed_again -> / list 0 1<0 -> save 0@z#5; start 0@z
  listed_again -> 0 ~it is read on from its end ~feedapi cursors restore
  given 0@a shared=True / list 0 1<0 / stored 0@z:drained#3
  refresh owned=[1] others=[] -> save 0@z:drained#4 1; start 1;
      discover / refresh owned=[0,1] others=[]
  list 0 1<0 -> save 0@z#5; start 0@z
  listed_again -> 0 ~it is read on from its end ~feedapi cursors restore
r06_a_discovery_that_began_before_the_drained_position_was_loaded_is_older
  given 0@a shared=True / list 0! 1<0 / load early / stored 0@z:drained#3
  refresh owned=[0,1] others=[] / list 0 1<0 began="early" -> / list 0 1<0 -> save 0@z#5; start 0@z
r06_an_end_that_is_committed_while_the_lease_goes_counts_at_once
  given 0@a shared=True / list 0! 1<0 / refresh owned=[0,1] others=[] / delivered 0 / end 0 z closed
  revoke 0 -> stop 0 | 0E 1W(0) / release 0 z -> save 0@z:drained#3 1; drained 0@z; start 1;
      discover | 0D 1R
r10_a_drained_partition_that_is_listed_open_asks_for_one_discovery
  given 0@z:drained#3 shared=True / list 0 -> / refresh -> / refresh -> / refresh ->
r17_an_older_load_overwrites_nothing
  given 0@a shared=True / list 0 / refresh owned=[0] / load early / commit 0 b
  refused 0 -> stop 0 | 0E / refresh owned=[0] began="early" -> | 0E / stored 0@c#3
  refresh owned=[0] -> start 0@c | 0R
  given 0@a shared=True / list 0 / load older / stored 0@b#2 / refresh others=[0]
  refresh others=[0] began="older" / checkpoint 0 c -> 0@c#3
  given 0@a shared=True / list 0 / refresh owned=[0] others=[] / load early / commit 0 b / revoke 0
  refresh others=[0] began="early" / checkpoint 0 c -> 0@c#3 / stored 0@a / refresh others=[0]
  checkpoint 0 c -> 0@c#2
  given 0@a shared=True / list 0! / stored 0@b:drained#2 / refresh others=[1] -> discover | 0D
  stored 0@a / refresh others=[1] -> | 0E
r17_a_batch_in_flight_is_committed_after_what_it_was_read_from
  given 0@a shared=True / list 0 / refresh owned=[0] others=[] / commit 0 b / delivered 0
  revoke 0 -> stop 0 / stored 0@a / refresh -> / checkpoint 0 c -> 0@c#3 | 0E
r17_two_first_starts_on_both_sides_of_a_split_fence_each_other
  list 0 -> save 0; start 0
  given / list 1<<0 -> save 0:superseded 1; start 1
  given start={1:"c"} / list 1<<0 -> save 0:superseded 1@c; start 1@c
r17_another_commit_than_was_saved_here_has_overtaken
  given 0@a 1@a shared=True / list 0 1 / refresh owned=[0,1] others=[] / commit 0 b / commit 1 b
  load now / overtaken now ->
  stored 0@c#3 1@c / load now / commit 1 c / overtaken now -> 0 / stored 1@a / load now
  overtaken now -> 0; 1 / refused 1 / overtaken now -> 0
r17_what_is_claimed_is_read_from_what_is_stored_even_while_a_batch_is_in_flight
  given 0@a shared=True / list 0 / refresh owned=[0] others=[] / delivered 0 / revoke 0
  stored 0@c#3 / refresh owned=[0] others=[] -> start 0@c | 0R
r17_what_is_stopped_is_held_back_as_if_it_had_not_been_started
  given 0@z:drained 1@c shared=True / list 0! 1<0 / refresh owned=[1] others=[]
  list 0 1<0 -> | 0E 1R / revoke 1 -> stop 1; report 1 ~waits for partition 0 | 0E 1W(0)
r17_what_is_owned_and_parked_is_named
  given 0@a 1@a shared=True / list 0 1 / refresh owned=[0] others=[1] / fail 0 -> stop 0 | 0P 1E
  fail 1 / parked -> 0 / leasable ->
r17_what_others_have_left_to_read_keeps_an_instance_from_being_finished
  given 0@a 1@a shared=True / list 0 1! / refresh owned=[0] others=[1] / end 0 a / finished -> False
  refresh owned=[0] others=[1] ended=[1] / finished -> False / list 0 1 / finished -> True
  given 0@a shared=True / list 0 / refresh others=[0] ended=[0] / list 1<<0
  list 1<<0 -> | 0V 1W(0) / finished -> False
r17_what_others_have_saved_is_taken
  given shared=True / list 0! / stored 0@z:drained#9 / refresh -> discover / list / stored 0@z#10
  refresh -> | 0V
  given shared=True / list 0 / stored 0@z:superseded#9 / refresh -> discover / list / stored 0@z#10
  refresh -> | 0V
  given shared=True / list 0! / stored 0@z:superseded#9 / refresh / stored 0@z:drained#10
  refresh owned=[0] -> discover | 0D
  given shared=True / list 0 / list -> | 0V / stored 0@z:drained#9 / refresh -> discover | 0D
  given shared=True / list 0 / list / list 0 -> | 0E
  given shared=True / list 0! 1<0 / stored 0@z:drained#9 / refresh -> discover | 0D 1E
  list 0 1<0 -> report 1 ~waits for partition 0 | 0E 1W(0)
r17_a_refused_transfer_takes_nothing
  given 0@a shared=True / list 0 / refresh owned=[0] others=[] / stored 0@c#4
  list 1<<0 -> stop 0; save 0@a:superseded#2 1@a | 0S 1E / refused 0 1 -> | 0E 1E
  refresh owned=[0] others=[] -> save 0@c:superseded#5 1@c | 0S 1E
# A selection of partitions
r07_only_the_selected_partitions_are_started_and_saved
  given partitions=[1,2] / list 0 1 2 -> save 1 2; start 1; start 2 | 1R 2R
  given partitions=[0] / list 0 / list 0 1 -> | 0R
r07_an_unknown_partition_is_an_error_that_names_it_and_changes_nothing
  given partitions=[0,9] / list 0 1 -> LineageError ~does not list this partition, ~0, 1
  given partitions=[99]
  list 0 1 2 3 4 5 6 7 8 -> LineageError ~only partitions 0, 1, 2, 3, 4, 5, 6, 7 and others
  given partitions=[0,9] start="last"
  list 0 ends={0:"e"} -> LineageError ~does not list this partition, ~0 / unresolved 0 9 -> 0; 9
  list 0 9 ends={0:"e",9:"f"} -> save 0@e 9@f; start 0@e; start 9@f
  given partitions=[99] / list ->
r11_a_selected_partition_that_vanishes_is_reported
  given partitions=[0] / list 0 1 / list 1 -> stop 0; report 0 ~stops at its cursor '_first'
  given 0@a partitions=[0] / list 1 -> report 0 ~stops at its cursor 'a'
  given partitions=[0] / list 0 / list 2<<0 1<<0 -> stop 0; report 0 ~stops at its cursor '_first'
r08_only_a_selected_parent_is_waited_for
  given partitions=[0,1] / list 0!z 1<0 2<0 | 0R 1W(0) / commit 0 z | 0D 1R
  given partitions=[1] / list 0 1<0 | 1R
  given partitions=[0,2] / list 0! 1!<0 2<1 | 0R 2R
  given partitions=[0,2] / list 0!end 2<<1 3 | 0R 2W(0) / commit 0 end | 0D 2R
r08_r09_what_is_gone_is_lost_as_without_a_selection
  given 0@a 7@b partitions=[0,1] / list 0 1<7 | 0R 1W(7) / list 0 1<7 | 0R 1P
  given 0@a 7@b:drained partitions=[0,1] / list 0 1<7 | 0R 1R
  given 0@a 1@b partitions=[0,2] / list 0 2<<7 | 0R 2W(1)
  list 0 2<<7 -> fail 2 LostPartitionError ~partition 1 had one and vanished
r07_start_counts_for_the_selected_partitions_alone
  given partitions=[1] start="last" / unresolved 0 1 -> 1
  list 0 1 ends={1:"e"} -> save 1@e; start 1@e
  given 0@a partitions=[1] start="last" / unresolved 0 1 -> 1
  list 0 1 ends={1:"e"} -> save 1@e; start 1@e
  given 3@a partitions=[1] start={3:"c"} / list 0 1<<3 -> LineageError ~not selected, or not listed
  given partitions=[1] start={1:"c"} / list 0 1 -> save 1@c; start 1@c
r09_a_cursor_of_selected_partitions_is_transferred_to_selected_ones
  given 0@a partitions=[0,1] / list 1<<0 2<<0 -> save 0@a:superseded#2 1@a; start 1@a
  given 0@a:superseded#2 1@a / list 1<<0 2<<0 -> save 0@a:superseded#3 2@a; start 2@a; start 1@a
  given 0@a partitions=[0] / list 0 / list 0 1<<0 -> | 0R
r09_the_cursor_of_an_ancestor_that_is_not_selected_is_left_to_it
  given 0@a partitions=[1,3]
  list 1<<0 3 -> save 3; fail 1 LineageError ~stored for partition 0, which is not selected; start 3
  given 0@a:drained partitions=[1,3] / list 1<<0 3 | 1P 3R
  given 0@a 3@c partitions=[1,3] / list 1<<0 3 | 1P 3R
  given 0@a partitions=[1,3] / list 0 1<<0 3 | 1P 3R
r09_a_superseded_cursor_of_others_is_taken_and_left_as_it_is
  given 0@a:superseded#4 9@b:superseded#4 partitions=[1] / list 1<<0,9 2<<0,9 -> save 1@a; start 1@a
  given 0@a:superseded#4 9@b:superseded#4 partitions=[1] start="last"
  list 1<<0,9 2<<0,9 -> save 1@a; start 1@a
  given partitions=[1] / list 1<<0 | 1R
  given 3@c:superseded#2 partitions=[4] / list 4<<5,3 | 4R / list 4<<5,3 | 4R
r09_what_went_to_successors_that_are_not_selected_is_not_lost
  given 0@a 1@b partitions=[0,1,5] / list 0!a 5<<4 2<<1 | 0D 1V 5R
  given 0@a 1@b partitions=[0,5] / list 0!a 5<<4 2<<1 | 0D 5R
"""
ROWS = parsed(HISTORIES)
MOVES = {(source, target) for source, target, _, _ in TRANSITIONS}


@pytest.fixture(autouse=True)
def _counted_revisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "draw_step", lambda: 1)


@pytest.mark.parametrize("name", ROWS)
def test_history(name: str) -> None:
    History().run(ROWS[name])


def test_every_transition_of_the_table_is_reached_by_a_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: set[tuple[State, State]] = set()

    def recorded(entry: Entry, state: State) -> None:
        moves.add((entry.state, state))
        move_entry(entry, state)

    monkeypatch.setattr(planner, "move_entry", recorded)
    for steps in ROWS.values():
        History().run(steps)
    assert moves == MOVES
    assert len(MOVES) == len(TRANSITIONS), "one row for each pair of states"


def test_a_transition_that_is_not_listed_is_refused() -> None:
    for source, target in set(permutations(State, 2)) - MOVES:
        entry = Entry(5, source)
        with pytest.raises(RuntimeError, match=f"5 must not go from '{source}' to '{target}'"):
            move_entry(entry, target)
        assert entry.state is source


def test_r18_only_parked_is_final() -> None:
    assert set(State) - {source for source, _ in MOVES} == {State.PARKED}
