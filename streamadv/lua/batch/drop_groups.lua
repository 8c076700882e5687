-- Groups that a naming passes over leave the log for good.
-- KEYS  void, trainer, groups, ledger, garbage, applied
-- ARGV  epoch, then for each group: entry id, reason ('trained': in the checkpoint already; others count as
--       dropped), number of trajectories, 'payload key bytes' ...
-- Returns  number of groups dropped, -1 when fenced; one that is gone from the log is skipped
-- include fence
-- include marks
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local dropped, at, marks = 0, 2, marks_of(KEYS[6])
while at <= #ARGV do
  local entry, reason, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  if redis.call('XDEL', KEYS[3], entry) == 1 then
    local counter = reason == 'trained' and reason or 'dropped:' .. reason
    redis.pcall('HINCRBY', KEYS[4], is_marked(marks, entry) and 'in_flight' or 'grouped', -count)
    redis.pcall('HINCRBY', KEYS[4], 'groups_logged', -1)
    redis.pcall('HINCRBY', KEYS[4], counter, count)
    redis.pcall('HINCRBY', KEYS[4], 'outcome:' .. reason, 1)
    for i = 1, count do redis.call('RPUSH', KEYS[5], ARGV[at + 2 + i]) end
    dropped = dropped + 1
  end
  at = at + 3 + count
end
return dropped
