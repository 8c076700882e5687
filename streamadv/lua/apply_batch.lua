-- What a named batch means for a shard: its groups are in flight, groups it excluded are dropped, advantage
-- workers get their work. Done once for each batch id.
-- KEYS  void, trainer, applied, groups, ledger, garbage, work
-- ARGV  epoch, batch id, trajectories taken here, groups taken here, number of groups dropped, then for each of
--       those: entry id, reason, trajectories, number of payloads, 'payload key bytes' ...; then work entries JSON ...
-- Returns  1, 0 when it was applied before, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HSETNX', KEYS[3], ARGV[2], ARGV[4]) == 0 then return 0 end
local taken = tonumber(ARGV[3])
if taken > 0 then
  redis.call('HINCRBY', KEYS[5], 'grouped', -taken)
  redis.call('HINCRBY', KEYS[5], 'in_flight', taken)
end
local at = 6
for _ = 1, tonumber(ARGV[5]) do
  local entry, reason, count, payloads = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  if redis.call('XDEL', KEYS[4], entry) == 1 then
    redis.call('HINCRBY', KEYS[5], 'grouped', -count)
    redis.call('HINCRBY', KEYS[5], 'groups_logged', -1)
    redis.call('HINCRBY', KEYS[5], 'dropped:' .. reason, count)
    redis.call('HINCRBY', KEYS[5], 'outcome:' .. reason, 1)
    for i = 1, payloads do redis.call('RPUSH', KEYS[6], ARGV[at + 3 + i]) end
  end
  at = at + 4 + payloads
end
for i = at, #ARGV do redis.call('XADD', KEYS[7], '*', 'work', ARGV[i]) end
return 1
