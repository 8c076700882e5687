-- A scorer's hand-off: trajectories it has scored go on to the next scorer, or to the rollouts stream. Those of groups
-- that have ended go straight there, sent by the scorer or the grouper.
-- KEYS  void, stream: scoring, target: scoring | rollouts, ledger
-- ARGV  consumer group, '1' if the next stream is the rollouts stream, then for each entry: entry id, group id,
--       index, kind ('usable' or 'unscorable'), reward, bytes, payload key, role, reference JSON
-- Returns  number of entries passed on; one that somebody else has finished (XDEL 0) is skipped. XACK cannot tell: an
--          entry that the grouper sends on need not be pending, as no scorer may have read it.
-- include last_id
if is_at_end(keys.target) then return redis.error_reply('STREAMEND no more entries fit into ' .. keys.target) end
local passed = 0
for at = 3, #ARGV, 9 do
  redis.call('XACK', keys.stream, ARGV[1], ARGV[at])
  if redis.call('XDEL', keys.stream, ARGV[at]) == 1 then
    redis.call('XADD', keys.target, '*', 'group_id', ARGV[at + 1], 'index', ARGV[at + 2], 'kind', ARGV[at + 3],
      'reward', ARGV[at + 4], 'bytes', ARGV[at + 5], 'key', ARGV[at + 6], 'role', ARGV[at + 7],
      'reference', ARGV[at + 8])
    passed = passed + 1
  end
end
if ARGV[2] == '1' and passed > 0 then
  redis.pcall('HINCRBY', keys.ledger, 'scoring', -passed)
  redis.pcall('HINCRBY', keys.ledger, 'rollouts', passed)
end
return passed
