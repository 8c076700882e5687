-- A group becomes a dead letter: out of the log, its payloads kept under their own byte count.
-- KEYS  void, trainer, groups, ledger, dead, dead_group, applied
-- fenced by trainer
-- ARGV  epoch, entry id, group id, id of the batch it was in ('' = none yet), reason, detail, trajectories, bytes
-- Returns  1, 0 when the log has no such entry (any more)
-- include clock
-- include dead_letter
-- include marks
local found = redis.call('XRANGE', keys.groups, ARGV[2], ARGV[2])
if #found == 0 then return 0 end
redis.call('XDEL', keys.groups, ARGV[2])
write_dead_letter(keys, ARGV[3], found[1][2], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
local place = is_marked(marks_of(keys.applied), ARGV[2]) and 'in_flight' or 'grouped'
if ARGV[4] ~= '' then
  local known = redis.call('HGET', keys.applied, 'dead:' .. ARGV[4])  -- a batch that comes again must not miss it
  redis.call('HSET', keys.applied, 'dead:' .. ARGV[4], (known and known .. '\n' or '') .. ARGV[3])
end
redis.pcall('HINCRBY', keys.ledger, place, string.format('%d', -tonumber(ARGV[7])))
redis.pcall('HINCRBY', keys.ledger, 'groups_logged', -1)
redis.pcall('HINCRBY', keys.ledger, 'dead:' .. ARGV[5], ARGV[7])
redis.pcall('HINCRBY', keys.ledger, 'outcome:dead', 1)
redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -tonumber(ARGV[8])))
redis.pcall('HINCRBY', keys.ledger, 'dead_bytes', ARGV[8])
return 1
