-- A scorer's hand-off: packets it has scored go on to the next scorer, or to the rollouts stream. Those of groups
-- that have ended go straight there, sent by the scorer or the grouper.
-- KEYS  void, stream: scoring, target: scoring | rollouts, ledger
-- ARGV  consumer group, '1' if the next stream is the rollouts stream, then for each entry: entry id, group id,
--       payload key, bytes, fencing epoch, members, member table
-- Returns  number of entries passed on; one that somebody else has finished (XDEL 0) is skipped. XACK cannot tell: an
--          entry that the grouper sends on need not be pending, as no scorer may have read it.
-- include count
-- include last_id
if is_at_end(keys.target) then return redis.error_reply('STREAMEND no more entries fit into ' .. keys.target) end
local PACKET_ARGS = 7
local passed, members = 0, 0
for at = 3, #ARGV, PACKET_ARGS do
  redis.call('XACK', keys.stream, ARGV[1], ARGV[at])
  if redis.call('XDEL', keys.stream, ARGV[at]) == 1 then
    redis.call('XADD', keys.target, '*', 'group_id', ARGV[at + 1], 'payload', ARGV[at + 2], 'bytes', ARGV[at + 3],
      'epoch', ARGV[at + 4], 'members', ARGV[at + 5], 'table', ARGV[at + 6])
    local _, lines = string.gsub(ARGV[at + 5], '\n', '')
    passed, members = passed + 1, members + lines
  end
end
if ARGV[2] == '1' then
  count('scoring', -members)
  count('scoring_packets', -passed)
  count('rollouts', members)
  count('rollouts_packets', passed)
  write_counts()
end
return passed
