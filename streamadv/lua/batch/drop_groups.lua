-- Groups that are not fit for a batch leave the log for good.
-- KEYS  void, trainer, groups, ledger, garbage, owners, kept, prompt_ends
-- fenced by trainer
-- ARGV  fence, '<batch that is being named> <drop_after>', then for each group: entry id (and ' <group id> <figures>' of a
--       prompt's group, see lib/prompt_end), reason ('trained': in the checkpoint already; others count as dropped), number of trajectories,
--       number of payloads, 'payload key bytes' ...
-- Returns  number of groups dropped; one that is gone from the log is skipped
-- include owners
-- include keep
-- include prompt_end
local dropped, at = 0, 3
while at <= #ARGV do
  local entry, prompt, figures = string.match(ARGV[at], '^(%S+) ?(%S*) ?(%S*)$')
  local reason, count, payloads = ARGV[at + 1], tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local kind = reason == 'trained' and reason or 'dropped'
  local logged = keeps(kind) and redis.call('XRANGE', keys.groups, entry, entry)[1]
  if redis.call('XDEL', keys.groups, entry) == 1 then
    redis.pcall('HINCRBY', keys.ledger, disown(keys.owners, entry), -count)
    redis.pcall('HINCRBY', keys.ledger, 'groups_logged', -1)
    redis.pcall('HINCRBY', keys.ledger, reason == 'trained' and reason or 'dropped:' .. reason, count)
    redis.pcall('HINCRBY', keys.ledger, 'outcome:' .. reason, 1)
    note_prompt_end(prompt, reason, figures)
    local kept = logged and keep(kind, reason, logged[2], {'naming', ARGV[2]})
    if kept then
      redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -kept))
    else
      for i = 1, payloads do redis.call('RPUSH', keys.garbage, ARGV[at + 3 + i]) end
    end
    dropped = dropped + 1
  end
  at = at + 4 + payloads
end
return dropped
