-- A group becomes a dead letter: out of the log, its payloads kept under their own byte count.
-- KEYS  void, trainer, groups, ledger, dead, hash of the dead group, applied
-- ARGV  epoch, entry id, group id, id of the batch it was in ('' = none yet), reason, detail, trajectories, bytes
-- Returns  1, 0 when the log has no such entry (any more), -1 when fenced
-- include clock
-- include fence
-- include dead_letter
-- include marks
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local found = redis.call('XRANGE', KEYS[3], ARGV[2], ARGV[2])
if #found == 0 then return 0 end
redis.call('XDEL', KEYS[3], ARGV[2])
local keys = {dead = KEYS[5], dead_group = KEYS[6]}
write_dead_letter(keys, ARGV[3], found[1][2], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
local place = is_marked(marks_of(KEYS[7]), ARGV[2]) and 'in_flight' or 'grouped'
if ARGV[4] ~= '' then
  local known = redis.call('HGET', KEYS[7], 'dead:' .. ARGV[4])  -- a batch that comes again must not miss it
  redis.call('HSET', KEYS[7], 'dead:' .. ARGV[4], (known and known .. '\n' or '') .. ARGV[3])
end
redis.pcall('HINCRBY', KEYS[4], place, string.format('%d', -tonumber(ARGV[7])))
redis.pcall('HINCRBY', KEYS[4], 'groups_logged', -1)
redis.pcall('HINCRBY', KEYS[4], 'dead:' .. ARGV[5], ARGV[7])
redis.pcall('HINCRBY', KEYS[4], 'outcome:dead', 1)
redis.pcall('HINCRBY', KEYS[4], 'live_bytes', string.format('%d', -tonumber(ARGV[8])))
redis.pcall('HINCRBY', KEYS[4], 'dead_bytes', ARGV[8])
return 1
