-- A group becomes a dead letter: out of the log, its payloads kept under their own byte count. Its batch remembers that it
-- does not miss the group.
-- KEYS  void, trainer, groups, ledger, dead, dead_group, garbage, applied, owners, prompt_ends
-- fenced by trainer
-- ARGV  fence, entry id, group id, id of the batch it is in ('' = none yet), reason, detail, trajectories, bytes
-- Returns  1, 0 when the log has no such entry (any more) or the shard no such batch: after data loss the
--       trainer applies the batch again and then repeats this
-- include dead_letter
-- include owners
-- include prompt_end
local entry, batch = ARGV[2], ARGV[4]
local logged = redis.call('XRANGE', keys.groups, entry, entry)
local exclusions = batch ~= '' and redis.call('HGET', keys.applied, batch)
if #logged == 0 or (batch ~= '' and not exclusions) then return 0 end
redis.call('XDEL', keys.groups, entry)
note_prompt_end(ARGV[3], 'dead')
write_dead_letter(ARGV[3], logged[1][2], ARGV[5], ARGV[6], ARGV[7], ARGV[8])
if exclusions then
  exclusions = cjson.decode(exclusions)
  exclusions[entry] = 'dead'
  redis.call('HSET', keys.applied, batch, cjson.encode(exclusions))
end
redis.pcall('HINCRBY', keys.ledger, disown(keys.owners, entry), string.format('%d', -tonumber(ARGV[7])))
redis.pcall('HINCRBY', keys.ledger, 'groups_logged', -1)
redis.pcall('HINCRBY', keys.ledger, 'dead:' .. ARGV[5], ARGV[7])
redis.pcall('HINCRBY', keys.ledger, 'outcome:dead', 1)
redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -tonumber(ARGV[8])))
redis.pcall('HINCRBY', keys.ledger, 'dead_bytes', ARGV[8])
return 1
